"""The names of the photographs that come with packages, for `quickstart.py --photo`.

Nothing is downloaded; `drsa_audit.package_photos` says where they are.

    python examples/photographs.py
"""

from __future__ import annotations

import argparse

from drsa_audit.package_photos import class_name, package_photos, random_crops

__all__ = ["class_name", "package_photos", "random_crops"]  # the notebooks take them from here


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    for name, load in package_photos().items():
        print(f"{name:16} {load().width} pixels")


if __name__ == "__main__":
    main()
