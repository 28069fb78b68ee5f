"""Pipeline parallelism in one SPMD program: layers over stages, ticks of a schedule, gradients of micro-batches."""
