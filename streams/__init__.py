"""Where batches come from: Zarr, Parquet, river, arrays and running solvers."""
