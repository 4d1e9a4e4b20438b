"""Where batches come from."""

from kalmanhead.streams.opening import SourceOptions, make_source, open_source
from kalmanhead.streams.source import Block, RandomAccessSource, Source, SourceSpec
from kalmanhead.streams.stream import Stream

__all__ = [
    "Block",
    "RandomAccessSource",
    "Source",
    "SourceOptions",
    "SourceSpec",
    "Stream",
    "make_source",
    "open_source",
]
