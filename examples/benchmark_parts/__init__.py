"""Parts of `examples/benchmark.py`: data, networks, backends, experiment, tables, figures."""
