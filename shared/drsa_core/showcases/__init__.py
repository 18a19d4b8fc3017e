"""The paper's showcases (section 7) and a test bed with known concepts.

`clever_hans` finds and removes a strategy that is right for the wrong reason, `matching` tells which concepts
belong to which classes, `manipulation` looks into manipulated explanations, `synthetic` plants concepts.
"""
