"""Programs behind the numbers: tables (section 5), showcases (section 6), known concepts. Not installed.

The tables of `benchmark`: `classes` (photographs), `backends` (methods by name, γ), `jobs` (what is fitted,
and what is read from it), `experiment` (collects, fits, explains and evaluates; an interrupted run goes on),
`checks` (ablation, stability, γ), `results`, `summary`, `tables` and `figures`.

`clever_hans` detects a strategy that is right for the wrong reason, `matching` tells which concepts belong to
which classes, `manipulation` looks into manipulated explanations, `synthetic` plants concepts, `plots` draws.
"""
