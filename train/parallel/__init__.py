"""Several devices and processes: `config.mesh` and `config.xla` in; shardings, compiler options and one run out.

Start with `axes.py`, the tables of mesh axes and ZeRO strategies, and `layout.py`, which makes shardings of them.
`xla_options.py` is what XLA is told. `processes.py` joins several processes into one run: `rendezvous.py` connects
them, `liveness.py` ends all when one dies.
"""
