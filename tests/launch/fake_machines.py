"""Machines that a fake cloud hands out: for each an address of this one, a real sshd on it, and an empty disk."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
MARK = "FAKE_MACHINE"  # in the environment of everything that runs on a machine

CONFIG = """\
ListenAddress {address}:{port}
HostKey {key}
AuthorizedKeysFile {disk}/authorized_keys
StrictModes no
UsePAM no
PidFile none
LogLevel ERROR
SetEnv {mark}={disk}
ForceCommand cd {disk}/home && exec sh -c "$SSH_ORIGINAL_COMMAND"
"""


class Machine:
    """Started with the ssh-keys metadata (USER:KEY) that it lets in."""

    def __init__(self, disk: Path, address: str, port: int, keys: str) -> None:
        assert SSHD is not None
        self.disk, self.address = disk, address
        (disk / "home").mkdir(parents=True)
        (disk / "authorized_keys").write_text(keys.partition(":")[2] + "\n")
        key = disk.parent / "host_key"
        if not key.exists():
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
        if os.getuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)
        config = disk / "sshd_config"
        config.write_text(CONFIG.format(address=address, port=port, key=key, disk=disk, mark=MARK))
        self.sshd = subprocess.Popen([SSHD, "-D", "-e", "-f", str(config)], start_new_session=True)

    def off(self) -> None:
        """As pulling the plug: nothing on it runs on, nothing is told."""
        self.sshd.kill()
        self.sshd.wait()
        deadline = time.monotonic() + 10
        while running := processes(self.disk):
            for process in running:
                os.kill(process, signal.SIGKILL)
            assert time.monotonic() < deadline
            time.sleep(0.02)


def processes(disk: Path) -> list[int]:
    """What runs on the machine with this disk."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                environment = (process / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if f"{MARK}={disk}".encode() in environment:
                found.append(int(process.name))
    return found
