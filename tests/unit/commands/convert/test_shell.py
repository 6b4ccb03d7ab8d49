"""Arguments are those that a shell would pass on, without running it."""

import subprocess
from typing import Any

import pytest

from rlflow.commands.convert.arguments import read_arguments
from rlflow.commands.convert.shell import read_script

SCRIPTS = [
    r"""x a.b="two  words" 'c d'=e f\ g ""h '"' "\"" "$" """,
    "n=4 m=3\nx $((n * (m + 2) - 10 / 3 % 2)) $(( $n+${m} )) $((n*-1))",
    'A=${A:-"${B:-/b}/c d"}\nx "$A" $A ${A:-no} ${NO:-yes} "${NO:-a b}"',
    'ONE=(a=1 "b=2 3")  # comment\nONE+=(c=4)\nx "${ONE[@]}" ${ONE[@]} d#e # f',
    "export P=/p Q=q\nx ${P}/$Q/'$Q'/\"$Q\" \\\n  last",
    "if true; then L=1; else L=2; fi\nx ok",
    "S='a.b=1 c.d=2'\nx $S \"$S\" && true",
    "f() { local Z=1; }\nx 2>/dev/null a >&2 b | true",
    "P=a; P+=b; x $P",
    "A=a B=b\nx $A/$B/c ${A}-$B/c '$A'/$B/$A",
    "A=a\nx '${A}' \\\\$A \\$A $A$A # $A",
    'if [ -z "$A" ]; then A=new; fi\n[ -n "$B" ] || B=b; [[ $A == n* && -n $B ]] && C=c\nx $A $B $C',
    "A=gpu\nif [ $A = npu ]; then N=16; elif [[ $A == gpu ]]; then N=8; else N=1; fi\nx $N",
    'N=4\nif [ $N -gt 2 ] && ! [ -n "$NO" ]; then M=large; else M=small; fi\nif ((N < 3)); then M=other; fi\nx $M',
    "while [[ $# -gt 0 ]]; do case $1 in -m) M=$2; shift 2;; esac; done\nM=${M:-default}\nx $M",
    "A=b\ncase $A in a|c) V=1;; b*) V=2;; *) V=3;; esac\nx $V",
    ': "${A:=a b}" ${B=c}\nexport C=${C:-d}\nx "$A" $B $C ${A:+yes} "${NO:+no}"',
    "P=/a/b.tar.gz\nx ${P%/*} ${P##*/} ${P%%.*} ${P#/a} ${P/a/c} ${P//a/} ${P%/}",
    'f() { local M=$1; shift; g "$M" "$@" $#; }\ng() { x "$@" $1 $# ${V:-no}; }\nV=later\nf a "b c" d',
    "f() { if [ $# -gt 1 ]; then x $2; else x $1; fi; }\nf one two",
    "A=(p 'q r' s)\nL=(${A[1]})\nx ${#A[@]} ${A[1]} ${#L[@]}",
    "E=''\nA=a\nx $E '' ${A^^} \"$E\" ${E:-e}",
    "C='x a.b=1 \"c d\"'\neval $C",
]


@pytest.mark.parametrize("script", SCRIPTS)
def test_words_are_those_of_bash(script: str) -> None:
    ours = next(words[1:] for words in read_script(script).commands if words and words[0] == "x")
    # The function x prints its words with a mark after each.
    printing = "exec 3>&1; x() { printf '%s\\1' \"$@\" >&3; }; "
    done = subprocess.run(
        ["/bin/bash", "-c", printing + "\n" + script], capture_output=True, text=True, timeout=60, env={}
    )
    assert ours == done.stdout.split("\1")[:-1]


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ('N=${N:-2}\nrun a.b="${N}"', 2),
        ("# a.b=7\nrun a.b=0.5 # a.b=9", 0.5),
        ("run a.b=$HOME/x", "$HOME/x"),
        ("run a.b=${HOME}/x", "$HOME/x"),
        ("run a.b=$((n * 2))", "$((n * 2))"),
        ("run a.b=$((1 / 0))", "$((1 / 0))"),
        ("run a.b=$(nproc)", "$(nproc)"),
        ("run a.b=[1,'x y'] ", [1, "x y"]),
        ("run \"a.b=[1,'x y']\"", [1, "x y"]),
        ("run a.b=False", False),
        ("run +a.b=1e-6", 1e-6),
        ("run a.b=null", None),
        ("run a.b=1,2", "1,2"),
        ("n=$((9999999999 * 9999999999))\nrun a.b=$n", "$((9999999999 * 9999999999))"),
        ("a=x\r\nrun a.b=$a\r\n", "x"),
    ],
)
def test_values_are_those_of_hydra_and_unknown_ones_stay(script: str, expected: Any) -> None:
    values = read_arguments(script).values
    assert values == {"a.b": expected}
    assert type(values["a.b"]) is type(expected)


@pytest.mark.parametrize(
    ("script", "value"),
    [
        # An argument of the script is not known, so that a written value is the better choice.
        ('while true; do case $1 in -m) M=$2;; *) break;; esac; done\nif [ -z "$M" ]; then M=default; fi', "default"),
        ("if [ $# -gt 1 ]; then M=$2; else M=default; fi", "default"),
        ("M=$1\nif some_command; then M=written; fi", "written"),
        # Branches that are not taken have the only values.
        ("case $1 in a) M=first;; b) M=second;; *) exit 1;; esac", "first"),
        ('if [ "$KIND" = a ]; then M=first; elif [ "$KIND" = b ]; then M=second; fi', "first"),
        ("if some_command; then M=first; else M=second; fi", "first"),
    ],
)
def test_a_written_value_of_branches_is_used(script: str, value: str) -> None:
    given = read_arguments(f"{script}\nrun a.b=$M")
    assert given.values == {"a.b": value}
    assert given.remarks["$M"].endswith(f"{value} is used")


@pytest.mark.parametrize(
    "script",
    [
        "if [ $RANK = 0 ]; then python -m verl.trainer.main_ppo a.b=1; fi",
        "if [ -z $X ]; then python -m verl.trainer.main_ppo a.b=1; else python -m verl.trainer.main_ppo a.b=2; fi",
        'bash -c "cd x && python3 -m verl.trainer.main_ppo a.b=1"',
        'sbatch --wrap="python3 -u -m verl.trainer.main_ppo a.b=1"',
        'C="ray job submit -- python -m verl.trainer.main_ppo a.b=1"\necho "$C"\neval "$C"',
        "f() { python -m verl.trainer.main_ppo a.b=$1; }\nf 1",
        "never_called() { python -m verl.trainer.main_ppo a.b=${N:-1}; }",
        "python prepare.py\npython -m verl.trainer.main_ppo a.b=1\npython -m verl.trainer.main_eval data.path=x",
    ],
)
def test_the_command_that_trains_is_found(script: str) -> None:
    assert read_arguments(script).values == {"a.b": 1}


def test_values_of_branches_are_named() -> None:
    """The value counts that the script has when it is started as it is; of an array too."""
    script = """
ALL=(g.h=1)
if [ $Z ]; then ALL+=(i.j=2); fi
gpus=8
case $X in npu) gpus=16;; *) exit 1;; esac
if [ $Y ]; then lr=1e-4; else lr=1e-6; fi
for n in 4 8; do run a.b=$lr c.d=$n e.f=$gpus "${ALL[@]}"; done
"""
    given = read_arguments(script)
    assert given.values == {"a.b": 1e-6, "c.d": 4, "e.f": 8, "g.h": 1}
    assert given.remarks == {
        "$ALL": "g.h=1 or g.h=1 i.j=2 in the script; g.h=1 is used",
        "$gpus": "8 or 16 in the script; 8 is used",
        "$lr": "1e-6 or 1e-4 in the script; 1e-6 is used",
        "$n": "4 or 8 in the script; 4 is used",
    }
