"""Budgets of tokens: none is overdrawn by more than one reservation, and neither clocks nor restarts renew one."""

import asyncio
import sqlite3

import grpc
import pytest

from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_engine import ConfigError, EngineMetrics, TokenEstimate, clock
from kestrel_grpc.security import budget_ledger
from kestrel_grpc.security.admission.budgets import BudgetExceeded, Budgets
from kestrel_grpc.security.budget_ledger import BudgetLedger, _process
from kestrel_grpc.security.identity.principal import Principal, Scope
from kestrel_grpc.security.identity.tokens import (
    TokenFileError,
    line_of,
    new_token,
    read_credentials,
)
from kestrel_grpc.settings.budgets import token_budget
from kestrel_grpc.settings.security import CallLimits, SecurityConfig
from tests.service.conftest import LIMITS, HeldRuntime, raw_image
from tests.service.statuses import failure
from tests.waiting import until

ANN = Principal("ann", frozenset({Scope.INFER}))
HOUR = 3600.0


def budgets(text):
    return Budgets(token_budget(text))


def reserve(all_, text=0, image=0, output=0, principal=ANN):
    return all_.of(principal)(TokenEstimate(text, image, output))


def spend(all_, tokens):
    held = reserve(all_, text=tokens)
    held.settle(EngineMetrics(input_tokens=tokens))
    held.close()


def test_reservations_never_exceed_the_budget_and_a_close_gives_back(wall):
    all_ = budgets("minute=100")
    held = [reserve(all_, text=5, output=5) for _ in range(10)]
    with pytest.raises(BudgetExceeded) as caught:
        reserve(all_, output=1)
    assert (caught.value.quota.held, caught.value.quota.share) == (100, 100)
    for each in held:
        each.close()
        each.close()
    assert reserve(all_, text=100)


def test_the_instant_of_the_reset_is_told_and_holds(wall):
    all_ = budgets("minute=100,day=150")
    wall[0] += 12.5
    spend(all_, 90)
    with pytest.raises(
        BudgetExceeded, match=r"ann: 90 of 100 tokens a minute .*10:01:00Z"
    ) as caught:
        reserve(all_, text=20)
    assert caught.value.retry_after_s == pytest.approx(47.5)
    wall[0] += 47.5
    spend(all_, 50)
    with pytest.raises(BudgetExceeded, match=r"tokens a day .*1970-01-02T00:00:00Z"):
        reserve(all_, text=20)


def test_what_exceeds_a_budget_counts_against_the_next_windows(wall):
    all_ = budgets("minute=100")
    spend(all_, 350)
    waits = []
    for _ in range(3):
        with pytest.raises(BudgetExceeded) as caught:
            reserve(all_, text=100)
        waits.append(caught.value.retry_after_s)
        wall[0] += 60
    assert waits == [240, 180, 120]
    spend(all_, 50)


def test_a_clock_that_is_set_back_gives_nothing_back_and_locks_nobody_out(wall):
    all_ = budgets("minute=100,day=1000")
    wall[0] += 30 * 24 * HOUR
    spend(all_, 100)
    wall[0] -= 29 * 24 * HOUR
    with pytest.raises(BudgetExceeded) as caught:
        reserve(all_, text=1)
    assert caught.value.retry_after_s == 60
    wall[0] += 60
    spend(all_, 100)


def test_each_kind_of_token_has_its_weight(wall):
    all_ = budgets("day=1000000,prompt=2,image=3,cached=0.5,output=10")
    held = reserve(all_, text=10, image=100, output=20)
    [account] = all_.accounts.values()
    assert account.reserved == 2 * 10 + 3 * 100 + 10 * 20
    held.settle(
        EngineMetrics(
            input_tokens=110,
            image_tokens=100,
            cached_image_tokens=100,
            cached_tokens=104,
            output_tokens=7,
        )
    )
    held.close()
    assert account.windows["day"].used == 2 * 6 + 0.5 * 104 + 10 * 7
    assert account.reserved == 0


def test_a_shadow_refuses_nothing_and_tells_once(wall, caplog):
    all_ = budgets("minute=100,shadow")
    for _ in range(3):
        spend(all_, 60)
    assert all_.exceeded == {("ann", "minute"): 2}
    assert [r.message for r in caplog.records if "shadow: ann: 60 of 100" in r.message] == [
        caplog.records[0].message
    ]


def test_the_file_of_tokens_overrides_the_default(tmp_path, wall):
    token, path = new_token(), tmp_path / "tokens"
    line = line_of("ann", [Scope.INFER], token)
    path.write_text(line.replace("sha256", "weight=2 minute=7 day=0 sha256"))
    found = read_credentials(str(path)).of_token(token)
    assert (found.weight, found.minute_tokens, found.day_tokens) == (2.0, 7, 0)
    all_ = budgets("minute=100,day=100")
    reserve(all_, text=7, principal=found)
    with pytest.raises(BudgetExceeded, match="7 of 7"):
        reserve(all_, text=1, principal=found)


@pytest.mark.parametrize("value", ["-1", "1e9", "nan", "9" * 5000, "", "1.5", "٣"])
def test_wrong_numbers_are_named_with_their_field(tmp_path, value):
    path = tmp_path / "tokens"
    line = line_of("ann", [Scope.INFER], new_token())
    path.write_text(line.replace("sha256", f"day={value} sha256"))
    with pytest.raises(TokenFileError, match=r"line 1: (day=|the third part)") as caught:
        read_credentials(str(path))
    assert len(str(caught.value)) < 300
    for field in ("minute", "output"):
        if value != "1.5" or field == "minute":
            with pytest.raises(ValueError, match=f"{field}={value[:40]}: must be"):
                token_budget(f"{field}={value}")
    for wrong in ("hour=1", "file="):
        with pytest.raises(ValueError, match=f"'{wrong}' is none of"):
            token_budget(wrong)
    assert token_budget("day=5,file=/a=b").file == "/a=b"


def test_the_limits_of_another_call_do_not_count(wall):
    """A batch has the budget of its beginning, and its principal's other calls have the present one."""
    all_ = budgets("")
    small, large = (Principal("ann", frozenset(), day_tokens=n) for n in (10, 1000))
    call = all_.of(small)
    reserve(all_, text=5, principal=large)
    with pytest.raises(BudgetExceeded, match="5 of 10 tokens a day"):
        call(TokenEstimate(text=20, image=0, output=0))
    reserve(all_, text=20, principal=large)


def shared(path, text="minute=100,day=100"):
    all_ = budgets(text)
    all_.ledger = BudgetLedger(str(path))
    return all_


def test_workers_and_restarts_share_a_budget(tmp_path, wall):
    path = tmp_path / "budgets"
    one, other = shared(path), shared(path)
    other.ledger._process = _process(1)  # It lives.
    held = reserve(one, text=30)
    spend(other, 40)
    with pytest.raises(BudgetExceeded, match="70 of 100"):
        reserve(other, text=31)
    held.close()
    rest = reserve(other, text=60)
    with pytest.raises(BudgetExceeded, match="100 of 100"):
        reserve(one, text=1)
    rest.close()
    assert oct(path.stat().st_mode)[-3:] == "600"
    # What a killed process had reserved counts as used.
    reserve(one, text=50)
    with pytest.raises(BudgetExceeded, match="90 of 100"):
        reserve(shared(path), text=11)
    # Of an ended process, whose pid another one has now.
    other = shared(path, "day=200")
    other.ledger._process = _process(1) + (1 << 32)
    reserve(other, text=100)
    spend(shared(path, "day=200"), 0)
    [held] = one.ledger._db.execute("SELECT total(tokens) FROM reservations").fetchall()
    assert held == (0,)


def test_processes_that_open_a_file_at_one_time_wait(tmp_path):
    path = str(tmp_path / "budgets")
    busy = sqlite3.connect(path, isolation_level=None)
    busy.execute("BEGIN IMMEDIATE")
    with clock.installed(sleep=lambda seconds: busy.execute("COMMIT")):
        BudgetLedger(path).close()
    assert not busy.in_transaction


def test_a_file_of_budgets_that_fails_is_named_once(tmp_path, wall, caplog):
    path = tmp_path / "budgets"
    path.write_text("{}")
    with pytest.raises(ConfigError, match=r"token_budget='file=.*not a database"):
        BudgetLedger(str(path))
    path.chmod(0o666)
    with pytest.raises(ConfigError, match="chmod o-w"):
        BudgetLedger(str(path))
    all_ = shared(tmp_path / "b")
    spend(all_, 60)
    all_.ledger._db.execute("DROP TABLE used")
    reserve(all_, text=30).close()
    with pytest.raises(BudgetExceeded, match="60 of 100"):
        reserve(all_, text=41)
    assert len(caplog.records) == 1


def test_a_locked_file_stops_the_event_loop_once_and_loses_nothing(tmp_path, wall, monkeypatch):
    monkeypatch.setattr(budget_ledger, "_WAIT_S", 0.02)
    path = tmp_path / "budgets"
    all_, other = shared(path), sqlite3.connect(path, isolation_level=None)
    waits = "PRAGMA busy_timeout"
    spend(all_, 3)
    other.execute("BEGIN IMMEDIATE")
    spend(all_, 60)
    assert all_.ledger._db.execute(waits).fetchone() == (0,)
    other.execute("ROLLBACK")
    spend(all_, 1)
    spend(all_, 1)
    with pytest.raises(BudgetExceeded, match="65 of 100"):
        reserve(shared(path), text=100)
    assert all_.ledger._db.execute(waits).fetchone() == (20,)


def query(max_tokens, image=False):
    task = pb.QueryTask(question="what?", max_tokens=max_tokens)
    return pb.QueryRequest(images=[raw_image()] if image else [], query=task)


async def held_server(serve, budget, **options):
    calls = CallLimits(token_budget=budget, **options)
    served = await serve(
        HeldRuntime(LIMITS), server_config={"security": SecurityConfig(calls=calls)}
    )
    served.runtime.gate.set()
    return served


async def test_many_calls_at_the_edge_of_a_budget(wall, serve):
    """The sum of what is used and reserved never exceeds the budget, and unused tokens come back."""
    served = await held_server(serve, "day=1000")
    count = await served.vision.CountTokens(
        pb.CountTokensRequest(tasks=[pb.Task(query=query(50).query)])
    )
    served.runtime.gate.clear()
    calls = [asyncio.ensure_future(served.vision.Query(query(50))) for _ in range(40)]
    most = count.input_tokens + 50
    fitting = 1000 // most
    await until(lambda: sum(call.done() for call in calls) == 40 - fitting)
    [account] = served.server.guard.budgets.accounts.values()
    assert account.reserved == fitting * most <= 1000
    told = await failure(served.vision.Query(query(50)))
    assert (told.code, told.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "BUDGET_EXCEEDED")
    assert told.quota_subject == "anonymous" and 0 < told.retry_after_s <= 86_400
    assert told.metadata["unit"] == "tokens a day" and told.metadata["limit"] == "1000"
    for call in [call for call in calls if not call.done()][: fitting - 1]:
        call.cancel()
    served.runtime.gate.set()
    ended = await asyncio.gather(*calls, return_exceptions=True)
    [response] = [each for each in ended if isinstance(each, pb.QueryResponse)]
    await until(lambda: not account.reserved)
    used = response.usage.input_tokens + response.usage.output_tokens
    assert used <= account.windows["day"].used < 1000 - (fitting - 2) * 50


async def test_a_refused_image_costs_nothing_and_an_unscheduled_request_neither(wall, serve):
    served = await held_server(serve, "day=100000")
    broken = query(5)
    broken.images.add(encoded=b"no image")
    assert (await failure(served.vision.Query(broken))).code is grpc.StatusCode.INVALID_ARGUMENT
    [account] = served.server.guard.budgets.accounts.values()
    assert (account.reserved, account.windows["day"].used) == (0, 0)
    response = await served.vision.Query(query(5, image=True))
    usage = response.usage
    await until(lambda: not account.reserved)
    assert account.windows["day"].used == usage.input_tokens + usage.output_tokens
    used = usage.input_tokens + usage.output_tokens
    await served.vision.Embed(pb.EmbedRequest(image=raw_image()))
    await until(lambda: account.windows["day"].used != used)
    assert account.windows["day"].used == used + usage.image_tokens
    served.runtime.fail_next = RuntimeError("x")
    await failure(served.vision.Query(query(3)))
    assert account.reserved == 0


async def test_without_a_budget_nothing_is_kept(serve):
    served = await held_server(serve, "")
    await served.vision.Query(query(3))
    assert not served.server.guard.budgets.accounts
