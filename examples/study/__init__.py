"""Programs behind the paper's numbers: showcases (section 6), known concepts. Not installed.

`clever_hans` detects a strategy that is right for the wrong reason, `matching` tells which concepts belong to
which classes, `manipulation` looks into manipulated explanations, `synthetic` plants concepts, `plots` draws.
"""
