"""Sharding over several devices: turns `config.mesh` and `config.xla` into a mesh, shardings and compiler options.

Start with `axes.py`, the tables of mesh axes and ZeRO strategies, and `layout.py`, which builds shardings from them.
`xla_options.py` has the options of XLA's compiler.
"""
