"""How much of a mapping lies on huge pages."""

from __future__ import annotations

from jubako.utils.huge_pages import bytes_on_huge_pages

SMAPS = """\
7f0000000000-7f0020000000 rw-p 00000000 fe:00 12 /a/file
Size:             524288 kB
AnonHugePages:         0 kB
FilePmdMapped:      4096 kB
VmFlags: rd wr
7f0020000000-7f0040000000 rw-p 00000000 00:00 0
AnonHugePages:      2048 kB
FilePmdMapped:         0 kB
"""


def test_each_mapping_has_its_own() -> None:
    assert bytes_on_huge_pages(0x7F0000000000, SMAPS) == 4096 * 1024
    assert bytes_on_huge_pages(0x7F0020000000, SMAPS) == 2048 * 1024
    assert bytes_on_huge_pages(0x7F0000001000, SMAPS) == 0
    assert bytes_on_huge_pages(0x7F0000000000, "") == 0
