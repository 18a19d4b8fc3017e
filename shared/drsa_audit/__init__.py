"""Whole experiments on networks and folders of photographs, above both adapters.

In the order of the data flow: `networks` (a network by name, with preprocessing and rules; `weights` says
where models come from), `images` (folders of photographs; `photographs` that come with packages), `backends`
(LRP, Gradient × Input, Integrated Gradients, Shapley values behind one interface), `jobs` (what is fitted,
and what is read from it), `experiment` (collects, fits, explains and evaluates; an interrupted run goes on),
`results`, `tables`, `figures`, and `benchmark`, which runs the paper's plan.
"""

from .backends import Backend, make_backend, relevance_at
from .benchmark import BenchmarkSettings, run_benchmark
from .experiment import Evaluation, Experiment, OutOfTime
from .figures import draw_figures
from .images import ClassImages, class_folders, find_classes, load_images, photo_files
from .networks import Network, load_network, with_upper_gamma
from .results import Results
from .tables import write_tables

__all__ = [
    "Backend",
    "BenchmarkSettings",
    "ClassImages",
    "Evaluation",
    "Experiment",
    "Network",
    "OutOfTime",
    "Results",
    "class_folders",
    "draw_figures",
    "find_classes",
    "load_images",
    "load_network",
    "make_backend",
    "photo_files",
    "relevance_at",
    "run_benchmark",
    "with_upper_gamma",
    "write_tables",
]
