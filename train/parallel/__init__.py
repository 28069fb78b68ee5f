"""Sharding over several devices: `config.mesh` and `config.xla` in; a mesh, shardings and compiler options out.

Start with `axes.py`, the tables of mesh axes and ZeRO strategies, and `layout.py`, which makes shardings of them.
`xla_options.py` has the options of XLA's compiler.
"""
