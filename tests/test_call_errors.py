"""A call with a wrong argument is answered with the right names: of every public class and function."""

from __future__ import annotations

import asyncio
import enum
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from pyspark import cloudpickle

import headgate as hg
from headgate import testing
from headgate.call_errors import WrongCallError
from headgate.testing import Collect

NOT_AN_OPTION = "a_name_that_nothing_has"


def public_callables() -> Iterator[tuple[str, Callable[..., Any], bool]]:
    """Title, callable, and whether users' functions call it for each record: such are not wrapped."""
    for module in (hg, testing):
        for name in module.__all__:
            value = getattr(module, name)
            if isinstance(value, type) and not issubclass(value, (Exception, enum.Enum)):
                is_for_each_record = value.__module__.startswith("headgate.operators.")
                for method, function in inspect.getmembers(value, callable):
                    if method == "__init__" or not method.startswith("_"):
                        yield f"{name}.{method}", function, is_for_each_record
            elif inspect.isfunction(value):
                yield name, value, False


def takes_any_name(function: Callable[..., Any]) -> bool:
    """Whether names are the user's own, such as columns, or every call is refused with a sentence."""
    parameters = inspect.signature(function).parameters.values()
    return any(one.kind is one.VAR_KEYWORD and not str(one.annotation).startswith("Unpack[") for one in parameters)


ALL = [
    (title, function, is_for_each_record)
    for title, function, is_for_each_record in public_callables()
    if (inspect.isfunction(function) or inspect.ismethod(function)) and not takes_any_name(function)
]


def call(function: Callable[..., Any]) -> object:
    given = {} if inspect.ismethod(function) or "self" not in inspect.signature(function).parameters else {"self": None}
    found = function(*given.values(), **{NOT_AN_OPTION: 1})
    return asyncio.run(found) if inspect.iscoroutine(found) else found


def problem_of(function: Callable[..., Any], is_for_each_record: bool) -> str | None:
    """Return what is wrong with the answer to an option that does not exist."""
    kind: type[Exception] = TypeError if is_for_each_record else hg.UsageError
    try:
        call(function)
    except kind as error:
        text = str(error)
        return None if NOT_AN_OPTION in text and not re.search(r"(^|[. ])_[A-Za-z]", text) else text
    return "it is taken"


def test_no_wrong_option_shows_internals() -> None:
    """One test for all of them: a thousand cost more to choose and to send than to run."""
    problems = [
        f"{title}: {problem}"
        for title, function, is_for_each_record in ALL
        if (problem := problem_of(function, is_for_each_record)) is not None
    ]
    assert problems == []


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("hg.TextFiles('x', folow=True)", "TextFiles() has no option 'folow'; did you mean 'follow'?"),
        ("hg.TextFiles()", "TextFiles() needs paths"),
        ("hg.Pipeline('x', paralelism=3)", "Pipeline() has no option 'paralelism'; did you mean 'parallelism'?"),
        (
            "hg.Pipeline('x', 3)",
            "Pipeline() takes only name by position; give options by name, such as parallelism=...",
        ),
        ("rows.sink(hg.Print(), nme='x')", "Stream.sink() has no option 'nme'; did you mean 'name'?"),
        ("rows.key_by('a', by='a')", "Stream.key_by() has no option 'by'; its options are name"),
        ("hg.Store.open(acess='x')", "Store.open() has no option 'acess'; did you mean 'access'?"),
        ("hg.Tumbling('5s', size='5s')", "Tumbling() was given size twice: by position and by name"),
        ("Collect()", "Collect() needs path"),
        ("testing.run(p, checkpointdir='x')", "run() has no option 'checkpointdir'; did you mean 'checkpoint_dir'?"),
        ("testing.run(p, restor='x')", "run() has no option 'restor'; did you mean 'restore'?"),
        (
            "hg.Tumbling('5s', lateness='1s')",
            "Tumbling(): lateness= is not there yet; it is window(..., allowed_lateness=...)",
        ),
    ],
)
def test_a_wrong_call_is_told_the_right_names(code: str, message: str) -> None:
    p = hg.Pipeline("p")
    rows = p.source(hg.FromRows([{"a": 1}]))
    with pytest.raises(hg.UsageError) as caught:
        eval(code, {"hg": hg, "p": p, "rows": rows, "Collect": Collect, "testing": testing})
    assert str(caught.value) == message


def test_a_handle_is_as_plain(tmp_path: Path) -> None:
    p = hg.Pipeline("p")
    p.source(hg.FromRows([{"a": 1}])).sink(hg.Discard())
    message = r"PipelineHandle.stop\(\) has no option 'savepiont'; did you mean 'savepoint'\?"
    with testing.running(p) as handle, pytest.raises(hg.UsageError, match=message):
        handle.stop(savepiont=tmp_path)  # type: ignore[call-arg]


def test_an_error_of_the_users_own_is_as_ever() -> None:
    class Mine(hg.FromRows):
        def schema(self) -> Any:
            raise TypeError("mine() got an unexpected keyword argument 'name'")

    with pytest.raises(TypeError, match="mine"):
        hg.Pipeline("p").source(Mine([{"a": 1}]), name="a")


def test_a_wrong_call_can_be_sent_between_processes() -> None:
    error = cloudpickle.loads(cloudpickle.dumps(WrongCallError("a sentence", "name")))
    assert (str(error), error.argument) == ("a sentence", "name")


def rows() -> hg.Stream:
    return hg.Pipeline("p").source(hg.FromRows([{"a": 1, "op": "insert"}]))


async def answered(row: dict[str, object]) -> dict[str, object]:
    return row


SWITCHES: dict[str, Callable[[Any], object]] = {
    "accumulate": lambda no: rows().key_by("a").window(hg.Tumbling("1s"), accumulate=no),
    "as_arrow": lambda no: rows().map_batches(lambda frame: frame, as_arrow=no),
    "create": lambda no: hg.DeltaSink("here", create=no),
    "discard": lambda no: hg.Global(every="1s", discard=no),
    "exceptions": lambda no: hg.DeadLetter(hg.Discard(), exceptions=no),
    "feed": lambda no: hg.Delta("here", feed=no),
    "follow": lambda no: hg.TextFiles("here", follow=no),
    "fresh": lambda no: hg.Pipeline("p").start_with(lambda *found: found, checkpoint_dir="here", fresh=no),
    "header": lambda no: hg.CsvFiles("/tmp", schema={"a": int}, header=no),
    "holds": lambda no: hg.StreamSource("store", "stream", holds=no),
    "ordered": lambda no: rows().map_async(answered, ordered=no),
    "retain_on_cancel": lambda no: hg.Checkpointing("1s", retain_on_cancel=no),
    "retractions": lambda no: rows().records_as_changes("a", retractions=no),
    "starts_empty": lambda no: hg.Evolution(starts_empty=no),
    "ties": lambda no: rows().key_by("a").top_per_window(1, by="a", ties=no),
    "tls": lambda no: hg.KafkaSecurity(tls=no),
    "upsert": lambda no: hg.KafkaSink("localhost:9092", "topic", upsert=no),
}


@pytest.mark.parametrize("option", SWITCHES)
@pytest.mark.parametrize("given", ["no", 0])
def test_an_option_that_is_on_or_off_is_true_or_false(option: str, given: object) -> None:
    with pytest.raises(hg.UsageError, match=f"{option}=? must be True or False, not {given!r}"):
        SWITCHES[option](given)


@pytest.mark.parametrize("option", ["retractions", "ordered"])
def test_verbs_of_a_keyed_stream_check_their_switches(option: str) -> None:
    keyed = rows().select("a").key_by("a")
    calls: list[Callable[[], object]] = [
        lambda: keyed.agg(n=pl.len(), retractions="no"),  # type: ignore[arg-type]
        lambda: keyed.deduplicate("last", within=None, retractions="no"),  # type: ignore[arg-type]
        lambda: keyed.top(1, by="a", within=None, retractions="no"),  # type: ignore[arg-type]
    ]
    if option == "ordered":
        calls = [lambda: keyed.map_async(answered, ordered="no")]  # type: ignore[arg-type]
    for call in calls:
        with pytest.raises(hg.UsageError, match=f"{option}= must be True or False, not 'no'"):
            call()


def test_a_split_is_not_silent_at_once() -> None:
    for option in ("idle_timeout", "silent_after"):
        with pytest.raises(hg.UsageError, match=f"{option} must be longer than zero"):
            rows().with_timestamps("a", **{option: "0s"})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Pulsar", "headgate has no name 'Pulsar': Pulsar is not there yet; let Spark read it and write a stream with"),
        ("PulsarSource", "Pulsar is not there yet; let Spark read it and write a stream with writeStream"),
        ("KafkaSource", "the source of Kafka is called headgate.Kafka"),
        ("CsvSink", "the sink of CSV files is headgate.FileSink(url, 'csv')"),
        ("read_csv", "the source of CSV files is called headgate.CsvFiles"),
        ("Join", "joins are made with stream.join(other, on='id', within=('-10s', '5s'))"),
        ("TextFile", "headgate has no name 'TextFile'; did you mean 'TextFiles'?"),
        ("zzz", "headgate has no name 'zzz'"),
    ],
)
def test_a_name_that_is_not_there(name: str, message: str) -> None:
    with pytest.raises(AttributeError) as caught:
        getattr(hg, name)
    assert message in str(caught.value)


def test_a_verb_that_is_misspelled() -> None:
    rows = hg.Pipeline("p").source(hg.FromRows([{"a": 1}]))
    with pytest.raises(AttributeError, match="'Stream' object has no attribute 'fliter'; did you mean 'filter'"):
        rows.fliter()


def help_of(title: str) -> str:
    name, _, method = title.partition(".")
    value = getattr(hg, name, None) or getattr(testing, name)
    return inspect.getdoc(getattr(value, method) if method else value) or ""


def test_help_shows_no_number_of_a_rule() -> None:
    titles = {one[0] for one in ALL} | {*hg.__all__, *testing.__all__}
    number = re.compile(r"\([A-Z]{1,2}\d{1,2}(, [A-Z]{1,2}\d{1,2})*\)")
    assert [title for title in sorted(titles) if number.search(help_of(title))] == []
