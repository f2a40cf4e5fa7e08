"""A JupyterLab of its own and a browser to look at it, for the tests that need both."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BROWSER = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
QUIET = ("--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
         "--disable-component-update --disable-sync").split()  # fmt: skip
TOKEN = "workbench"


@contextmanager
def lab(folder: Path, home: Path) -> Iterator[str]:
    """JupyterLab on a folder, with a home directory of its own; yields its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--ip=127.0.0.1", f"--port={port}", "--allow-root"]
    command += [f"--IdentityProvider.token={TOKEN}", f"--ServerApp.root_dir={folder}", "--expose-app-in-browser"]
    command += ["--LabApp.news_url=None"]
    with open(home / "lab.log", "wb") as log:
        server = subprocess.Popen(command, env={**os.environ, "HOME": str(home)}, stdout=log, stderr=log)
        try:
            address = f"http://127.0.0.1:{port}"
            for _ in range(120):
                assert server.poll() is None, (home / "lab.log").read_text()
                try:
                    urllib.request.urlopen(f"{address}/api", timeout=5).close()
                    break
                except OSError:
                    time.sleep(0.5)
            else:
                raise AssertionError(f"JupyterLab did not come up:\n{(home / 'lab.log').read_text()}")
            yield address
        finally:
            server.terminate()
            server.wait(timeout=30)


def opened(page: Any) -> None:
    """Wait until a notebook is shown and its kernel idles: run before that, JupyterLab asks which kernel to take."""
    page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)
    page.wait_for_selector(".jp-StatusBar-Widget >> text=/\\| Idle/", timeout=60_000)
