"""How much memory a data set may take."""

import os
from pathlib import Path

MEMINFO = Path("/proc/meminfo")
CGROUPS = (  # a container's limit and use, in control groups of version 2 and 1
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
)


def available_bytes() -> int:
    """Bytes that can be allocated without swapping, within the container's limit."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2  # macOS does not say what is free: take half
    if MEMINFO.is_file():  # Linux: includes the file cache that can be dropped
        lines = dict(line.split(":") for line in MEMINFO.read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
    return min([free, *(_number(limit) - _number(used) for limit, used in CGROUPS if _number(limit))])


def _number(path: Path) -> int:
    text = path.read_text().strip() if path.is_file() else ""
    return int(text) if text.isdigit() else 0  # 0 for no limit (`max`)
