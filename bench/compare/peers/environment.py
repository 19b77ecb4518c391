"""A virtual environment for one server, so that its packages are nobody else's.

Owns: making one, installing into it, and looking up what is in it.
Does not know: which server.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import Distribution, distributions
from pathlib import Path


class VirtualEnvironment:
    """One folder that `python -m venv` makes, with the Python that runs this.

    Attributes:
        folder: where.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        """Where its packages are.

        Raises:
            FileNotFoundError: it has not been made.
        """
        for path in self.folder.glob("lib/python*/site-packages"):
            return path
        raise FileNotFoundError(self.folder)

    def make(self) -> None:
        """Makes it when it is not there."""
        if not self.python.exists():
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            subprocess.run([sys.executable, "-m", "venv", str(self.folder)], check=True)

    def pip_install(self, *arguments: str) -> None:
        """Runs `pip install`.

        Raises:
            subprocess.CalledProcessError: it failed.
        """
        pip = [str(self.python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *arguments], check=True)

    def distribution(self, name: str) -> Distribution | None:
        """An installed package; None when it is not there."""
        if not self.python.exists():
            return None
        return next(iter(distributions(name=name, path=[str(self.site_packages)])), None)
