"""Other methods with the interface of the solvers, for studies."""
