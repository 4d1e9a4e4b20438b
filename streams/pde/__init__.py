"""Equations solved while they are streamed, or written to a file: operators to be learnt."""

from kalmanhead.streams.pde.advection import Advection
from kalmanhead.streams.pde.baselines import baselines
from kalmanhead.streams.pde.burgers import Burgers
from kalmanhead.streams.pde.darcy import Darcy
from kalmanhead.streams.pde.equation import Equation
from kalmanhead.streams.pde.ks import KuramotoSivashinsky
from kalmanhead.streams.pde.ns2d import NavierStokes2d
from kalmanhead.streams.pde.source import EQUATIONS, PdeSource, open_pde
from kalmanhead.streams.pde.zarr_file import write_zarr

__all__ = [
    "EQUATIONS",
    "Advection",
    "Burgers",
    "Darcy",
    "Equation",
    "KuramotoSivashinsky",
    "NavierStokes2d",
    "PdeSource",
    "baselines",
    "open_pde",
    "write_zarr",
]
