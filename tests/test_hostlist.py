"""Host lists, both ways, and host files."""

from __future__ import annotations

import contextlib
import doctest
import re

import pytest
from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrun_nccl import hostlist
from torchrun_nccl.errors import BadHostList
from torchrun_nccl.hostlist import MAX_HOSTS, expand, fold, parse_hostfile, parse_hosts, short_names


@pytest.mark.parametrize(
    "text, hosts",
    [
        ("alpha,beta", "alpha beta"),
        ("linux[1,2]", "linux1 linux2"),
        ("a[1-2],b3", "a1 a2 b3"),  # a comma between groups is not a comma in one
        ("a[1-2],b[3-4]", "a1 a2 b3 b4"),
        ("a,b[001,003],c", "a b001 b003 c"),
        ("h[001,003-004,006]", "h001 h003 h004 h006"),  # width kept
        ("n[09-11]", "n09 n10 n11"),
        ("n[9-11]", "n9 n10 n11"),
        ("n[0-10]", "n0 n1 n2 n3 n4 n5 n6 n7 n8 n9 n10"),  # 0 alone is not a width of its own
        ("n[000-002]", "n000 n001 n002"),
        ("n[3-3]", "n3"),
        ("c4-[011-012],c9-002", "c4-011 c4-012 c9-002"),
        ("gadi-gpu-v100-[0001,0003].nci.org.au", "gadi-gpu-v100-0001.nci.org.au gadi-gpu-v100-0003.nci.org.au"),
        ("r[1-2]n[08-11]", "r1n08 r1n09 r1n10 r1n11 r2n08 r2n09 r2n10 r2n11"),  # the left number changes last
        ("n[1-2]-ib", "n1-ib n2-ib"),
        ("x[0-1]y[2,4-5]z", "x0y2z x0y4z x0y5z x1y2z x1y4z x1y5z"),
        ("n[1-2][3-4]", "n13 n14 n23 n24"),
        ("n[10,2]", "n10 n2"),  # order kept: it is the rank order
        ("n9 n10,n9,n[8-10]", "n9 n10 n8"),  # once each, at its first place
        (" a ,,\n\tb, ", "a b"),
        ("n[1, 3]", "n1 n3"),
        ("me@n[1-2],you.x@m", "me@n1 me@n2 you.x@m"),
        ("n_1 N1 n1", "n_1 N1 n1"),
        ("10.0.0.[9-10]", "10.0.0.9 10.0.0.10"),
        ("2001:db8::5,[2001:db8::6] me@::1 fe80::1%ib0", "2001:db8::5 2001:db8::6 me@::1 fe80::1%ib0"),
    ],
)
def test_expand(text: str, hosts: str) -> None:
    assert expand(text) == tuple(hosts.split())


@pytest.mark.parametrize(
    "text, part, character, problem",
    [
        ("a,gpu[1-", "[1-", 6, "has no closing bracket"),
        ("a[1-2,b3", "[1-2,b3", 2, "has no closing bracket"),
        ("a[1[2]]", "[1[2]]", 2, "has no closing bracket"),
        ("n1],m2", "]", 3, "closes no bracket"),
        ("a,n[]", "[]", 4, "has an empty range"),
        ("n[1,,2]", "[1,,2]", 2, "has an empty range"),
        ("n[1-]", "1-", 3, "is not a number or a range"),
        ("n[-3]", "-3", 3, "is not a number or a range"),
        ("n[1,a-b]", "a-b", 5, "is not a number or a range"),
        ("n[1 2]", "1 2", 3, "is not a number or a range"),
        ("n[1-9/2]", "1-9/2", 3, "is not a number or a range"),
        ("n[٣]", "\\u0663", 3, "is not a number or a range"),  # a digit, but not for host names
        ("n[0,5-1]", "5-1", 5, "runs backwards"),
        # As ClusterShell; Slurm never writes these.
        ("n[01-100]", "01-100", 3, "mixes widths"),
        ("n[1-010]", "1-010", 3, "mixes widths"),
        ("n[0-010]", "0-010", 3, "mixes widths"),
        ("n[00-1]", "00-1", 3, "mixes widths"),
        ("a n[0-999999999]", "n[0-999999999]", 3, f"stands for more than {MAX_HOSTS} hosts"),
        ("n[1-1000]m[1-1000]", "n[1-1000]m[1-1000]", 1, f"stands for more than {MAX_HOSTS} hosts"),
        ("a b;c", "b;c", 3, "is not a host name"),
        ("-oProxyCommand=x", "-oProxyCommand=x", 1, "is not a host name"),
        ("n1,n\x1b", "n\\u001b", 4, "is not a host name"),
        ("me@", "me@", 1, "is not a host name"),
        ("@n1", "@n1", 1, "is not a host name"),
        ("2", "2", 1, "is a number, not a host name"),  # meant as a number of nodes
        ("n [1-2]", "[1-2]", 3, "is a number, not a host name"),
        ("10.0.0.[255-256]", "10.0.0.[255-256]", 1, "is a number, not a host name"),
        ("a,n1:4", "n1:4", 3, "is neither a host name nor an IPv6 address"),
        ("[2001:db8::5", "[2001:db8::5", 1, "is neither a host name nor an IPv6 address"),
        ("2001:db8::zz", "2001:db8::zz", 1, "is neither a host name nor an IPv6 address"),
        ("fe80::1", "fe80::1", 1, "is a link-local address"),
    ],
)
def test_bad_list_names_the_place(text: str, part: str, character: int, problem: str) -> None:
    with pytest.raises(BadHostList) as caught:
        expand(text, "--hosts")
    assert str(caught.value).startswith(f'--hosts: "{part}" at character {character} {problem}')


def test_bad_list_as_a_whole() -> None:
    with pytest.raises(BadHostList, match=r'^--hosts: no host in " ,"; write hosts as'):
        expand(" ,", "--hosts")
    with pytest.raises(BadHostList, match=r"^--hosts stands for more than 100000 hosts$"):
        expand("n[1-99999],m[1-99999]", "--hosts")
    with pytest.raises(BadHostList, match=r'^--hosts: "x{57}\.\.\." at character 1 is not a host name'):
        expand("x" * 300, "--hosts")


@pytest.mark.parametrize(
    "text, hosts",
    [
        ("n1", [("n1", 0, 0)]),  # 0: the list does not say
        ("n[1-2]:4,m7", [("n1", 0, 4), ("n2", 1, 4), ("m7", 2, 0)]),
        ("b:2,a:1,b:3", [("b", 0, 5), ("a", 1, 1)]),
        ("b,a,b", [("b", 0, 0), ("a", 1, 0)]),
        ("me@n1:2", [("me@n1", 0, 2)]),
        ("[2001:db8::5]:4 2001:db8::6 me@[::1]:2", [("2001:db8::5", 0, 4), ("2001:db8::6", 1, 0), ("me@::1", 2, 2)]),
    ],
)
def test_hosts_with_slots(text: str, hosts: list[tuple[str, int, int]]) -> None:
    assert [(host.name, host.line, host.slots) for host in parse_hosts(text, "--hosts")] == hosts


@pytest.mark.parametrize(
    "text, message",
    [
        ("a,n1:0", '--hosts: "0" at character 6 is not a number of slots from 1 up'),
        ("n1:", '--hosts: "" at character 4 is not a number of slots from 1 up'),
        ("n1:many", '--hosts: "many" at character 4 is not a number of slots from 1 up'),
        (":4", '--hosts: "" at character 1 is not a host name; write hosts as n1,n2 or n[1-3,7]'),
        ("", '--hosts: no host in ""; write hosts as n1,n2 or n[1-3,7]'),
    ],
)
def test_bad_slots(text: str, message: str) -> None:
    with pytest.raises(BadHostList, match=f"^{re.escape(message)}$"):
        parse_hosts(text, "--hosts")


@pytest.mark.parametrize(
    "text, hosts",
    [
        ("n1", [("n1", 0, 0)]),  # no final newline
        ("n1\r\n\n# c\n  n3  \nn2 slots=4 # x\nn4:2\n", [("n1", 0, 0), ("n3", 3, 0), ("n2", 4, 4), ("n4", 5, 2)]),
        ("me@n1 slots=2\r\nn2\tslots = 3\r\n", [("me@n1", 0, 2), ("n2", 1, 3)]),
        ("n[01-02] slots=4\nm[1, 3],k:2\n", [("n01", 0, 4), ("n02", 0, 4), ("m1", 1, 0), ("m3", 1, 0), ("k", 1, 2)]),
        ("n2 slots=2\nn1\nn2:3\nn1\n", [("n2", 0, 5), ("n1", 1, 0)]),  # slots add up; without any, none are invented
        ("\ufeffn1\n", [("n1", 0, 0)]),
        ("2001:db8::5\n[::6]:4\n10.0.0.1 slots=2\n", [("2001:db8::5", 0, 0), ("::6", 1, 4), ("10.0.0.1", 2, 2)]),
    ],
)
def test_hostfile(text: str, hosts: list[tuple[str, int, int]]) -> None:
    parsed = parse_hostfile(text, "hosts.txt")
    assert [(host.name, host.line, host.slots) for host in parsed] == hosts
    assert {(host.gpus, host.cpus) for host in parsed} == {(None, None)}


_LINE_HELP = "; a line is HOST, HOST slots=N or HOST:N"
_NAME_HELP = "; write hosts as n1,n2 or n[1-3,7]"


@pytest.mark.parametrize(
    "text, message",
    [
        ("n1\n\nn5 lots=8\n", 'hosts.txt line 3 "n5 lots=8": "lots=8" at character 4 is not slots=N' + _LINE_HELP),
        ("n1 n2", 'hosts.txt line 1 "n1 n2": "n2" at character 4 is not slots=N' + _LINE_HELP),
        ("n1 slots=", 'hosts.txt line 1 "n1 slots=": "slots=" at character 4 is not slots=N' + _LINE_HELP),
        ("n1 slots=2 x", 'hosts.txt line 1 "n1 slots=2 x": "x" at character 12 is not slots=N' + _LINE_HELP),
        ("n1 slots=0", 'hosts.txt line 1 "n1 slots=0": "0" at character 10 is not a number of slots from 1 up'),
        ("n1:2 slots=2", 'hosts.txt line 1 "n1:2 slots=2": "2" at character 12 gives the slots a second time'),
        ("# x\n  gpu[1-\n", 'hosts.txt line 2 "gpu[1-": "[1-" at character 4 has no closing bracket'),
        ("n1\nh1 4 a.q@h1", 'hosts.txt line 2 "h1 4 a.q@h1": "4 a.q@h1" at character 4 is not slots=N' + _LINE_HELP),
        ("n1;x", 'hosts.txt line 1 "n1;x": "n1;x" at character 1 is not a host name' + _NAME_HELP),
        (",", 'hosts.txt line 1 ",": no host in ","' + _NAME_HELP),
        ("", "hosts.txt names no host" + _LINE_HELP),
        ("\r\n# nothing\n", "hosts.txt names no host" + _LINE_HELP),
        ("n[1-60000]\nm[1-60000]\n", "hosts.txt stands for more than 100000 hosts"),
    ],
)
def test_bad_hostfile_names_the_line(text: str, message: str) -> None:
    with pytest.raises(BadHostList, match=f"^{re.escape(message)}$"):
        parse_hostfile(text, "hosts.txt")


@pytest.mark.parametrize(
    "hosts, folded",
    [
        ("", ""),
        ("n1", "n1"),
        ("gpu3 gpu7 gpu5 gpu4 gpu6", "gpu[3-7]"),
        ("gpu9 gpu10 gpu12", "gpu[9-10,12]"),
        ("n08 n09 n10 n8", "n[8,08-10]"),
        ("n98 n99 n100", "n[98-100]"),
        ("n099 n100 n1", "n[1,099-100]"),
        ("n09 n10 n99 n100", "n[09-10,99-100]"),
        ("login n1 n2", "login,n[1-2]"),
        ("gadi-gpu-v100-0009.nci.org.au gadi-gpu-v100-0010.nci.org.au", "gadi-gpu-v100-[0009-0010].nci.org.au"),
        ("r1n1 r1n2 r2n1 r2n2", "r[1-2]n[1-2]"),
        ("r1n1 r1n2 r2n1", "r1n[1-2],r2n1"),
        ("x4711c1s2b0n0 x4711c1s3b0n0 x4711c2s1b0n0", "x4711c1s[2-3]b0n0,x4711c2s1b0n0"),
        ("10.0.0.1 10.0.0.2 2001:db8::1 2001:db8::2", "10.0.0.[1-2],2001:db8::1,2001:db8::2"),
    ],
)
def test_fold(hosts: str, folded: str) -> None:
    assert fold(hosts.split()) == folded


@pytest.mark.parametrize(
    "hosts, short",
    [
        ("gadi-gpu-v100-0031.gadi.nci.org.au n2", "gadi-gpu-v100-0031 n2"),
        ("n1.east n1.west n2.east", "n1.east n1.west n2"),
        ("n1 n1.east", "n1 n1.east"),
        ("me@n1.east me@10.0.0.1", "n1 10.0.0.1"),
        ("a@n1 b@n1", "a@n1 b@n1"),
        ("10.0.0.1 2001:db8::5 fe80::1%ib0.8001", "10.0.0.1 2001:db8::5 fe80::1%ib0.8001"),
    ],
)
def test_short_names(hosts: str, short: str) -> None:
    assert short_names(hosts.split()) == tuple(short.split())


# What both we and ClusterShell call a list: names that begin with a letter, numbers padded alike in a range.
_LETTERS = st.sampled_from(("n", "gpu", "a-", "c4-", "x0y", "R"))
_BETWEEN = st.sampled_from(("n", "-r", "s1b"))
_END = st.sampled_from(("", "", "-ib", ".site.test", "z9", "z10"))


@st.composite
def _ranges(draw: st.DrawFn) -> tuple[str, list[str]]:
    """The text of a bracket, and its numbers in the written order."""
    width = draw(st.integers(0, 3))
    spans = draw(st.lists(st.tuples(st.integers(0, 120), st.integers(0, 4)), min_size=1, max_size=3))
    numbers = [
        [f"{number:0{max(width, 3 if width else 1)}d}" for number in range(low, low + more + 1)] for low, more in spans
    ]
    text = ",".join(span[0] if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in numbers)
    return f"[{text}]", [number for span in numbers for number in span]


@st.composite
def _word(draw: st.DrawFn) -> tuple[str, list[str]]:
    text, names = draw(_LETTERS), [""]
    names = [text]
    for index in range(draw(st.integers(0, 2))):
        between = draw(_BETWEEN) if index else ""
        bracket, numbers = draw(_ranges())
        text += between + bracket
        names = [name + between + number for name in names for number in numbers]
    end = draw(_END)
    return text + end, [name + end for name in names]


_LISTS = st.lists(_word(), min_size=1, max_size=3)


@settings(max_examples=10000, derandomize=True, database=None, deadline=None)
@given(_LISTS)
def test_expand_is_clustershells_set_in_the_written_order(words: list[tuple[str, list[str]]]) -> None:
    text = ",".join(word for word, _ in words)
    hosts = expand(text)
    assert set(hosts) == set(NodeSet(text, resolver=RESOLVER_NOGROUP))
    assert hosts == tuple(dict.fromkeys(name for _, names in words for name in names))


_NAME = st.tuples(st.sampled_from(("a", "n", "me@n")), st.sampled_from(("", "0", "8", "09", "99", "100", "7x3")), _END)
_NAMES = st.lists(_NAME.map("".join), max_size=12)


@settings(max_examples=500, derandomize=True, database=None, deadline=None)
@given(_NAMES)
def test_fold_stands_for_the_same_set(hosts: list[str]) -> None:
    folded = fold(hosts)
    assert set(expand(folded) if hosts else ()) == set(hosts)
    assert len(folded) <= len(",".join(hosts)) + 2 * len(hosts)


@settings(max_examples=500, derandomize=True, database=None, deadline=None)
@given(st.text(st.sampled_from("ab1290[]-,:. @%\n\t#=;é\x00"), max_size=24))
def test_any_text_is_a_list_or_a_bad_one(text: str) -> None:
    for parse in (expand, parse_hosts, parse_hostfile):
        with contextlib.suppress(BadHostList):
            assert parse(text, "list")


def test_docstrings() -> None:
    assert doctest.testmod(hostlist) == doctest.TestResults(failed=0, attempted=10)
