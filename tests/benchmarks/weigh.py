"""What the library weighs: lines, files, and what one call crosses.

    python tests/benchmarks/weigh.py [REPOSITORY]

Prints a Markdown table. Functions, modules and depth of a call are those of this library only, counted with
`sys.setprofile` in a second call, as the first one validates the rules.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(sys.argv[1] if len(sys.argv) > 1 else __file__).resolve()
ROOT = ROOT if len(sys.argv) > 1 else ROOT.parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "shared")]

import torch  # noqa: E402
from captum.attr import IntegratedGradients  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from zennit.attribution import Gradient  # noqa: E402
from zennit.composites import EpsilonPlus  # noqa: E402

PACKAGES = tuple(str(ROOT / name) for name in ("shared", "zennit_drsa", "captum_drsa"))


def lines(*folders: str, leave_out: tuple[str, ...] = ()) -> tuple[int, int]:
    """Lines and files of Python in folders of the repository."""
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    files = [file for file in files if not any(part in file.parts for part in leave_out)]
    return sum(file.read_bytes().count(b"\n") for file in files), len(files)


def crossed(call: Callable[[], Any]) -> tuple[int, int, int]:
    """Own functions, modules and depth of the stack of a call."""
    functions: set[CodeType] = set()
    deepest = 0

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal deepest
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(PACKAGES):
            return
        if code.co_name.startswith("<"):  # lambdas and comprehensions
            return
        functions.add(code)
        depth, above = 0, frame
        while above is not None:
            depth += above.f_code.co_filename.startswith(PACKAGES)
            above = above.f_back  # type: ignore[assignment]
        deepest = max(deepest, depth)

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return len(functions), len({code.co_filename for code in functions}), deepest


def network() -> nn.Sequential:
    """Seven layers for images (N, 3, 8, 8)."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(8 * 16, 16), nn.Linear(16, 3)).eval()


def passes(call: Callable[[], Any], model: nn.Module) -> int:
    """Forward passes of a model in a call."""
    count = 0

    def counted(module: nn.Module, args: Any) -> None:
        nonlocal count
        count += 1

    handle = model[0].register_forward_pre_hook(counted)  # type: ignore[index]
    call()
    handle.remove()
    return count


def main() -> None:
    from drsa_core import RandomSubspaces, Subspaces

    from captum_drsa import DisentangledAttribution
    from zennit_drsa import DisentangledAttributor

    core = "shared/drsa_core"
    print("| | measured |\n|---|---|")
    thin = lines(core, "zennit_drsa", "captum_drsa", leave_out=("evaluation", "plot"))
    print(f"| core and adapters, without evaluation and plots | {thin[0]} lines, {thin[1]} files |")
    installed = lines("shared", "zennit_drsa", "captum_drsa")
    print(f"| all that is installed | {installed[0]} lines, {installed[1]} files |")
    tests = lines("tests", leave_out=("benchmarks", "study"))
    print(f"| tests, without benchmarks and study | {tests[0]} lines, {tests[1]} files |")

    model, x, y = network(), torch.rand(2, 3, 8, 8), torch.eye(3)[[0, 1]]
    pairs = torch.randn(40, 8), torch.randn(40, 8)
    subspaces: Subspaces = RandomSubspaces(4, random_state=0).fit(*pairs).subspaces_
    attributor = DisentangledAttributor(Gradient(model, EpsilonPlus()), "3", subspaces)
    method = DisentangledAttribution(IntegratedGradients(model), "3", subspaces)
    target: Tensor = torch.tensor([0, 1])
    calls = {
        "DisentangledAttributor(x, y)": lambda: attributor(x, y),
        "DisentangledAttribution(IntegratedGradients(m)).attribute": lambda: method.attribute(
            x, target=target
        ),
    }
    for name, call in calls.items():
        call()
        print(f"| `{name}`: functions / modules / depth | {' / '.join(map(str, crossed(call)))} |")
    with_whole = passes(lambda: attributor.explain(x, [0, 1]), model)
    without = passes(lambda: attributor.explain(x, [0, 1], whole=False), model)
    print(f"| forward passes of Zennit's `explain`, with `whole` | {without}, {with_whole} |")


if __name__ == "__main__":
    main()
