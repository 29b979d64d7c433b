"""The profiling tool runs where there is no GPU, at tiny sizes."""

import pytest

pytest.importorskip("triton")

from benchmarks.diagnostics import profile_moe

TINY = [
    "--experts", "4", "--experts-per-token", "2", "--dim", "32", "--inner", "16",
    "--iterations", "2", "--warmup-iters", "1",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["--mode", "decode", "--refresh-routing"],
        ["--mode", "prefill", "--tokens", "70", "--nvtx", "--format", "bf16"],
    ],
)
def test_it_runs_and_times_each_iteration(arguments, capsys):
    times = profile_moe.main([*TINY, *arguments])
    assert len(times) == 2
    assert all(t > 0 for t in times)
    printed = capsys.readouterr().out
    assert printed.startswith(f"{arguments[1]}: {70 if '--tokens' in arguments else 4} tokens")


def test_help_and_refusals(capsys):
    with pytest.raises(SystemExit) as exit_status:
        profile_moe.main(["--help"])
    assert exit_status.value.code == 0
    assert "--refresh-routing" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        profile_moe.main(["--iterations", "0"])
    with pytest.raises(SystemExit):
        profile_moe.main(["--mode", "decode", "--tokens", "65"])
    assert "1 to 64" in capsys.readouterr().err
