"""`run_fit`: from a folder of images to subspaces in a file. What an audit begins with, on its own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drsa_core import Pairs, Subspaces
from torch import Tensor

from .audit_steps import collect, forward_seconds, noted, repeat_notes
from .concepts import Learned, learn, learning_seconds
from .errors import BadInput
from .folders import ImageFiles, TargetClass, find_files, find_target
from .networks import Network
from .opening import RunSettings, describe_preprocessing, open_model
from .progress import Progress
from .session import Session, open_session
from .work import Work, check_out, read_json, work_folder, write_json


@dataclass(frozen=True, kw_only=True)
class FitSettings(RunSettings):
    """What decides which concepts are learned, beside what `RunSettings` and `ModelSettings` hold.

    Attributes
    ----------
    train : path
        Folder of images of the class, or of class folders.
    target : str or int
        The class that is explained, by name or number.
    out : path
        The file to write.
    work : path, optional
        Folder for what is done so far. Default: beside `out`, with the ending .drsa.
    layer : str, optional
        Default: that of the network, or the suggested one.
    subspaces : int or "auto"
        Number of concepts.
    balance : float
        How far unequal evidence is levelled before the fit, as in `DRSA`.
    positions : int
        Positions in an image at which the concepts are learned.
    train_images : int
        At most so many.
    stability : bool
        Whether to repeat the fit, to see which concepts come back.
    """

    train: Path
    target: str | int
    out: Path
    work: Path | None = None
    layer: str | None = None
    subspaces: int | str = 4
    balance: float = 1.0
    positions: int = 20
    train_images: int = 500
    stability: bool = True


@dataclass(frozen=True)
class Training:
    """What concepts are learned from.

    Attributes
    ----------
    session : Session
    files : ImageFiles
    inputs : tensor, shape (N, 3, H, W)
        Of the class.
    work : Work
    forward : float
        Seconds of a forward pass of one image.
    key : dict
        What decides the pairs.
    """

    session: Session
    files: ImageFiles
    inputs: Tensor
    work: Work
    forward: float
    key: dict[str, Any]


def run_fit(settings: FitSettings, progress: Progress) -> Learned:
    """Learn the concepts of a class and save them; a run that was interrupted goes on."""
    check_out(settings.out)
    training = open_training(settings, progress)
    learned, _ = learn_class(training, settings, collect_class(training, settings))
    learned.subspaces.save(settings.out)
    return learned


def open_training(settings: FitSettings, progress: Progress, folders: tuple[Path, ...] = ()) -> Training:
    """Resolve model, class, files, layer and method; nothing long is begun before all of them are right.

    Parameters
    ----------
    folders : tuple of path
        Further folders, in which names of classes may be found.
    """
    with progress.step("prepare", "Loading the model and the images"):
        for folder in (settings.train, *folders):
            if not folder.is_dir():
                raise BadInput(f"there is no folder {folder}")
        network, n_outputs = open_model(settings)
        target = find_target(network, n_outputs, str(settings.target), [settings.train, *folders])
        files = find_files(settings.train, target, settings.train_images)
        if files.doubt and not settings.force:
            raise BadInput(f"{files.doubt}; --force learns from them all the same")
        if files.doubt:
            progress.note(files.doubt)
        session, _ = open_session(
            settings,
            network,
            target,
            files.own,
            progress,
            layer=settings.layer,
            channel_dim=settings.channel_dim,
        )
        if session.layer.is_cut is False:
            progress.note(f"paths go around layer {session.layer.name}: what takes them is in no concept map")
        work = Work(work_folder(settings.out, settings.work))
        inputs, _, _ = session.read(files.own)
        key = {**session.decided_by(files.own), "positions": settings.positions}
        return Training(session, files, inputs, work, forward_seconds(session, inputs), key)


def collect_class(training: Training, settings: FitSettings) -> Pairs:
    """Pairs (a, c) of the class."""
    folder = training.work.place("pairs", training.key)
    return collect(training.session, training.inputs, settings.positions, folder, training.forward)


def learn_class(training: Training, settings: FitSettings, pairs: Pairs) -> tuple[Learned, dict[str, Any]]:
    """The concepts of the class, and what decided them; learned once, and then read."""
    session, work = training.session, training.work
    key = {
        **training.key,
        "subspaces": settings.subspaces,
        "balance": settings.balance,
        "stability": settings.stability,
    }
    file, about = work.place("learned", key, ".safetensors"), work.place("learned", key, ".json")
    notes = work.place("learned", key, ".notes.json")
    if not (file.exists() and about.exists()):
        how = (settings.subspaces, settings.balance, settings.stability)
        # The estimate costs a fit, so that it is made for those only who read it.
        seconds = _learning_seconds(pairs, *how) if session.progress.shown else None
        what = f"Learning concepts from {len(pairs)} pairs"
        with session.progress.step("concepts", what, seconds), noted(session, notes):
            learned = learn(session, pairs, *how)
        about_run = metadata_of(session.network, session.target, session.name)
        learned.subspaces.with_metadata(**about_run).save(file)
        write_json(
            about, {"history": learned.history, "stability": learned.stability, "choice": learned.choice}
        )
    repeat_notes(session, notes)  # of the run that learned them
    return Learned(Subspaces.load(file), **read_json(about)), key


def _learning_seconds(pairs: Pairs, n_subspaces: int | str, balance: float, repeat: bool) -> float | None:
    try:
        return learning_seconds(pairs, n_subspaces, balance, repeat)
    except ValueError:
        return None  # what is wrong with the pairs is said by the step itself


def metadata_of(network: Network, target: TargetClass, name: str) -> dict[str, Any]:
    """What subspaces remember beside their provenance: class, name of the network, preprocessing."""
    return {
        "explained_class": {"name": target.name, "index": target.index},
        "network": name,
        "preprocessing": describe_preprocessing(network),
    }
