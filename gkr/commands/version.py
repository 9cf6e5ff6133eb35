"""`gkr version`."""

from __future__ import annotations

import click

from gkr.options import output_option

_PARTS = ("torch", "ray", "pyzmq", "pydantic")


@click.command(name="version")
@output_option()
def command(*, output: str) -> None:
    """Print the versions of gkr, Python and the parts that decide results."""
    import platform

    from gkr.output import result, result_json

    versions = {"gkr": _version("gkr") or "0.1.0 (not installed)", "python": platform.python_version()}
    versions |= {name: _version(name) or "not installed" for name in _PARTS}
    if output == "json":
        result_json(versions)
        return
    for name, version in versions.items():
        result(f"{name} {version}")


def _version(name: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return None
