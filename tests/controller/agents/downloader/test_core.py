# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.agents.downloader.archives import check_symlink
from controller.agents.downloader.cache import (
    EntryLockState,
    EvictionCandidate,
    choose_evictions,
    next_cache_step,
    parse_completion_marker,
)
from controller.agents.downloader.core.errors import ContentRefused, UriInvalid
from controller.agents.downloader.core.fetch_plan import (
    ByteRange,
    Checksum,
    FileListing,
    FilePart,
    FileSelection,
    RemoteFile,
    RetryPolicy,
    SlowTransferDetector,
    archive_kind,
    cache_entry_key,
    cached_listing_key,
    choose_files,
    is_wanted,
    journal_discard_line,
    journal_header,
    journal_line,
    mark_single_archive,
    merge_ranges,
    missing_ranges,
    plan_file_parts,
    read_journal,
    retry_delay_s,
    safe_path,
)
from controller.agents.downloader.core.uri import (
    AzureLocation,
    BucketLocation,
    FileLocation,
    HdfsLocation,
    HubLocation,
    OciLocation,
    PvcLocation,
    WebLocation,
    parse_uri,
    redact_uri,
)

DIGEST = "sha256:" + "a" * 64
SPANS = st.lists(
    st.tuples(st.integers(0, 300), st.integers(0, 300)).map(lambda one: ByteRange(min(one), max(one))), max_size=12
)


@pytest.mark.parametrize(
    ("uri", "place"),
    [
        ("hf://org/model", HubLocation("org/model")),
        ("hf://org/model@v1.0", HubLocation("org/model", "v1.0")),
        ("hf://org/model:v1.0", HubLocation("org/model", "v1.0")),
        ("hf://org/model@refs/pr/3/sub/dir/", HubLocation("org/model", "refs/pr/3", "sub/dir")),
        ("s3://bucket/llama/8b", BucketLocation("s3", "bucket", "llama/8b")),
        ("gs://my_bucket", BucketLocation("gs", "my_bucket", "")),
        ("az://container/a/b", AzureLocation("", "container", "a/b")),
        ("az://me.blob.core.windows.net/container/a", AzureLocation("me.blob.core.windows.net", "container", "a")),
        ("https://h:8443/a/m.tar.gz?x=1#f", WebLocation("https://h:8443/a/m.tar.gz?x=1")),
        ("oci://reg:5000/a/b", OciLocation("reg:5000", "a/b", "latest")),
        ("oci://reg/a/b:v1", OciLocation("reg", "a/b", "v1")),
        (f"oci://reg/a/b:v1@{DIGEST}", OciLocation("reg", "a/b", DIGEST)),
        ("hdfs://nn:9870/models//llama", HdfsLocation("nn:9870", "/models/llama")),
        ("pvc://weights/llama/8b", PvcLocation("weights", "llama/8b")),
        ("pvc://weights", PvcLocation("weights", "")),
        ("file:///mnt/models", FileLocation("/mnt/models")),
    ],
)
def test_a_uri_names_a_place(uri: str, place: object) -> None:
    assert parse_uri(uri) == place


@pytest.mark.parametrize(
    "uri",
    [
        "llama",
        "ftp://h/x",
        "hf://model",
        "hf://org/model@",
        "hf://org/../x",
        "s3:///x",
        "s3://b x/y",
        "az://C/x",
        "http:///x",
        "http://h:port/x",
        "http://user:secret@h/x",
        "oci://reg",
        "oci://reg/UPPER",
        "oci://reg/a@sha256:abc",
        "hdfs://nn",
        "hdfs://nn/../x",
        "pvc://UPPER/x",
        "pvc://weights/../x",
        "file://host/x",
        "file:///a/../../etc",
        "https://h/a\r\nb",
    ],
)
def test_a_uri_that_cannot_be_used_is_refused_without_its_secrets(uri: str) -> None:
    with pytest.raises(UriInvalid) as refused:
        parse_uri(uri)
    assert "secret" not in str(refused.value)


def test_what_is_shown_of_a_uri_has_no_credentials() -> None:
    assert redact_uri("https://me:pw@h/m.bin?sig=secret#x") == "https://h/m.bin"
    assert redact_uri("hf://org/model@v1") == "hf://org/model@v1"


def test_the_same_weights_have_one_key_and_others_another() -> None:
    def key(
        uri: str, revision: str = "r", files: tuple[RemoteFile, ...] = (RemoteFile("a", 1, "u"),), **more: object
    ) -> str:
        return cache_entry_key(FileSelection(parse_uri(uri), **more), FileListing(revision, files))  # type: ignore[arg-type]

    signed = "https://h/m?file=a&X-Amz-Signature={0}&X-Amz-Date={0}"
    assert key(signed.format("1")) == key(signed.format("2"))
    assert key("https://h/m?file=a") != key("https://h/m?file=b")
    assert key("hf://o/m@main") == key("hf://o/m@v1")  # both are revision r now
    different = [
        key("hf://o/m"),
        key("hf://o/n"),
        key("hf://o/m", "s"),
        key("hf://o/m", allow=("*.json",)),
        key("hf://o/m", ignore=("*.json",)),
        key("hf://o/m", sha256=(("a", "0"),)),
        key("hf://o/m", unpack=False),
        key("hf://o/m", files=(RemoteFile("a", 1, "u", Checksum("md5", "0")),)),
        key("hf://o/m", files=(RemoteFile("a", 1, "u", version="2"),)),
    ]
    assert len(set(different)) == len(different)
    assert cached_listing_key(FileSelection(parse_uri("hf://o/m@v1")), "a") == cached_listing_key(
        FileSelection(parse_uri("hf://o/m"), revision="v1"), "a"
    )


@given(SPANS, st.integers(0, 400))
def test_what_is_missing_and_what_is_there_make_the_whole(there: list[ByteRange], size: int) -> None:
    have = {byte for span in there for byte in range(span.start, min(span.end, size))}
    lack = [byte for span in missing_ranges(size, there) for byte in range(span.start, span.end)]
    assert sorted(have | set(lack)) == list(range(size))
    assert len(lack) == len(set(lack))
    assert not have & set(lack)
    assert {byte for span in merge_ranges(there) for byte in range(span.start, span.end)} == {
        byte for span in there for byte in range(span.start, span.end)
    }


@given(SPANS, st.integers(1, 400), st.integers(1, 100))
def test_parts_are_no_larger_than_asked_and_fetch_each_missing_byte_once(
    there: list[ByteRange], size: int, part: int
) -> None:
    parts = list(plan_file_parts(3, RemoteFile("a", size, "u"), there, part))
    assert all(one.end is not None and one.end - one.start <= part for one in parts)
    asked = [byte for one in parts for byte in range(one.start, one.end or 0)]
    assert sorted(asked) == [byte for span in missing_ranges(size, there) for byte in range(span.start, span.end)]


def test_a_file_without_ranges_is_one_part() -> None:
    assert list(plan_file_parts(0, RemoteFile("a", 9, "u", ranges=False), [ByteRange(0, 4)], 2)) == [FilePart(0, 0, 9)]
    assert list(plan_file_parts(0, RemoteFile("a", None, "u"), [], 2)) == [FilePart(0, 0, None)]
    assert list(plan_file_parts(0, RemoteFile("a", 0, "u"), [], 2)) == []


@given(st.lists(st.tuples(st.integers(0, 3), SPANS.filter(bool)), max_size=5), st.integers(0, 200))
def test_a_journal_that_a_crash_cut_short_never_says_more_than_is_there(
    wrote: list[tuple[int, list[ByteRange]]], cut: int
) -> None:
    head = journal_header(FileListing("r", ()), "digest")
    lines = [journal_line(file, span) for file, spans in wrote for span in spans if span.end > span.start]
    whole = head + "".join(lines)
    there = read_journal(whole[: max(len(head), len(whole) - cut)], head)
    assert there is not None
    said = {(file, byte) for file, spans in there.items() for span in spans for byte in range(span.start, span.end)}
    truth = {(file, byte) for file, spans in wrote for span in spans for byte in range(span.start, span.end)}
    assert said <= truth
    assert read_journal(whole, head.replace("digest", "other")) is None


@pytest.mark.parametrize("cut", range(1, 12))
def test_what_is_written_behind_a_line_that_was_cut_short_counts(cut: int) -> None:
    """The disk was full, or the machine crashed."""
    head = journal_header(FileListing("r", ()), "d")
    text = head + journal_line(1, ByteRange(0, 64)) + journal_line(1, ByteRange(64, 128))[:-cut]
    assert read_journal(text + journal_line(2, ByteRange(0, 9)), head) == {1: [ByteRange(0, 64)], 2: [ByteRange(0, 9)]}
    assert read_journal(text + journal_discard_line(1), head) == {1: []}


def test_a_file_that_was_removed_is_forgotten() -> None:
    head = journal_header(FileListing("r", ()), "d")
    text = head + journal_line(0, ByteRange(0, 9)) + journal_discard_line(0) + journal_line(0, ByteRange(2, 4))
    assert read_journal(text, head) == {0: [ByteRange(2, 4)]}


def test_patterns_fit_as_the_hub_has_them() -> None:
    assert is_wanted("a/b.safetensors", ["*.safetensors"], [])
    assert not is_wanted("a/b.bin", ["*.safetensors"], [])
    assert not is_wanted("original/x.json", [], ["original/"])
    assert not is_wanted("x.json", ["*.json"], ["x.*"])
    assert not is_wanted("X.JSON", ["*.json"], [])


@pytest.mark.parametrize("path", ["", "/a", "a//b", "../a", "a/..", "a\0b", "a\\b", "./a", "n" * 256, "d/" * 600 + "x"])
def test_a_path_that_leads_elsewhere_is_refused(path: str) -> None:
    with pytest.raises(ContentRefused):
        safe_path(path)


def test_a_file_in_a_file_and_two_of_one_name_are_refused() -> None:
    for paths in (("a", "a/b"), ("a", "a")):
        with pytest.raises(ContentRefused):
            choose_files(FileListing("r", tuple(RemoteFile(path, 1, "u") for path in paths)), [], [], {})


def test_one_archive_is_unpacked_and_one_among_files_is_not() -> None:
    archive, other = RemoteFile("m.tar.gz", 1, "u"), RemoteFile("x", 1, "u")
    assert mark_single_archive(FileListing("r", (archive,))).files[0].archive == "tar.gz"
    assert mark_single_archive(FileListing("r", (archive, other))).files == (archive, other)
    assert [archive_kind(one) for one in ("a.tgz", "a.TAR", "a.zip", "a.tar.zst", "tar", "a.gz")] == [
        "tar.gz", "tar", "zip", "tar.zst", "", "",
    ]  # fmt: skip


@given(st.lists(st.sampled_from(["..", ".", "a", "b", ""]), max_size=6), st.integers(0, 3))
def test_a_link_that_is_admitted_stays_below_the_directory(parts: list[str], depth: int) -> None:
    target = "/".join(parts)
    try:
        check_symlink("d/" * depth + "link", target)
    except ContentRefused:
        return
    at = depth
    for part in parts:
        at += -1 if part == ".." else 1 if part not in ("", ".") else 0
        assert at >= 0


def test_only_who_holds_the_lock_fetches() -> None:
    assert next_cache_step(EntryLockState(is_ready=True, holds_lock=False)) == "use"
    assert next_cache_step(EntryLockState(is_ready=False, holds_lock=True)) == "fetch"
    assert next_cache_step(EntryLockState(is_ready=False, holds_lock=False)) == "follow"


def test_a_marker_that_was_cut_short_is_none() -> None:
    assert parse_completion_marker(b'{"uri": "x"') is None
    assert parse_completion_marker(b"") is None


ENTRIES = st.lists(
    st.builds(
        EvictionCandidate,
        key=st.integers(0, 10**6).map(str),
        size=st.integers(0, 100),
        used_at_s=st.floats(0, 100),
        is_held=st.booleans(),
        is_ready=st.booleans(),
    ),
    max_size=8,
    unique_by=lambda one: one.key,
)


@given(ENTRIES, st.integers(0, 300), st.integers(0, 100))
def test_eviction_takes_the_least_recent_that_nobody_holds_and_no_more_than_needed(
    entries: list[EvictionCandidate], limit: int, needed: int
) -> None:
    gone = choose_evictions(entries, limit=limit, needed=needed, keep="7")
    by_key = {one.key: one for one in entries}
    assert all(not by_key[key].is_held and key != "7" for key in gone)
    assert gone == sorted(gone, key=lambda key: (by_key[key].is_ready, by_key[key].used_at_s))
    total = sum(one.size for one in entries if one.key != "7") + needed
    if gone:
        assert total - sum(by_key[key].size for key in gone[:-1]) > limit
    free = [one.key for one in entries if not one.is_held and one.key != "7"]
    assert total - sum(by_key[key].size for key in gone) <= limit or sorted(gone) == sorted(free)


@given(st.integers(1, 7), st.floats(0, 1000), st.integers(0, 1000))
def test_waits_grow_are_bounded_and_obey_what_the_server_asks(failures: int, asked_s: float, seed: int) -> None:
    retry = RetryPolicy(attempts=8, first_s=0.5, longest_s=30)
    waited_s = retry_delay_s(retry, failures, None, random.Random(seed))
    assert waited_s is not None
    bound_s = min(30, 0.5 * 2 ** (failures - 1))
    assert bound_s / 2 <= waited_s <= bound_s
    asked = retry_delay_s(retry, failures, asked_s, random.Random(seed))
    assert asked == max(waited_s, min(asked_s, 300))
    assert retry_delay_s(retry, 8, asked_s, random.Random(seed)) is None


def test_a_server_that_drips_counts_as_stalled() -> None:
    pace = SlowTransferDetector(window_s=10, least_bytes=1000, now_s=0)
    assert not pace.add_bytes_and_check(1, 9.9)
    assert pace.add_bytes_and_check(1, 10.1)
    assert not pace.add_bytes_and_check(1000, 20.2)
