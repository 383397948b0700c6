"""Types decoded by several threads at once."""

import subprocess
import sys

# Names its own types, so that each is decoded for the first time by four threads at once.
PROGRAM = """
import sys
import threading
from dataclasses import make_dataclass

import msgspec

from headgate.codec.decodable import decodable

sys.setswitchinterval(1e-6)
for number in range(300):
    inner = make_dataclass("Inner", [("a", int), ("b", str)])
    fields = [(f"field_{index}", dict[str, list[int]]) for index in range(20)]
    outer = make_dataclass("Outer", [("inner", inner | None), *fields])
    data = msgspec.json.encode({"inner": {"a": 1, "b": "c"}, **{name: {} for name, _ in fields}})
    found = []

    def decode():
        found.append(msgspec.json.decode(data, type=decodable(outer)))

    threads = [threading.Thread(target=decode) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [one.inner for one in found] == [inner(1, "c")] * 4
"""


def test_threads_decode_a_type_for_the_first_time_at_once() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)

    assert ended.returncode == 0, ended.stderr
