"""The kernels for adapters against float64: rows with different adapters and without, ranks of several slabs, shapes
that do not divide evenly."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from kestrel_engine.kernels.adapters.layer_norm import (
    NextProducts,
    SummedChange,
    WholeChange,
    adapted_layer_norm,
)
from kestrel_engine.kernels.adapters.rows import expand_rows, shrink_rows
from kestrel_engine.kernels.adapters.slabs import RANKS, RowSlabs, distance, shrunk_rows
from kestrel_engine.kernels.layer_norm import add_layer_norm
from kestrel_engine.kernels.linear import skinny_linear as skinny_linear_module
from kestrel_engine.kernels.linear.skinny_linear import ColumnChange, GemmChanges, skinny_linear
from kestrel_engine.kernels.linear.skinny_tiling import adapter_parts

pytestmark = pytest.mark.usefixtures("checked_addresses")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DIM, HIDDEN = 52, 75


class Slabs:
    """Random adapters of an MLP of the given numbers of slabs, and rows that use one of them, or none (-1)."""

    def __init__(self, adapters, users, dtype=torch.float32, first=DIM):
        self.places, size = {}, 0
        shapes = {"up": (HIDDEN, DIM), "down": (DIM, HIDDEN), "first": (first, DIM)}
        for name, (rows, columns) in shapes.items():
            self.places[name] = size, size + RANKS * columns, rows, columns
            size += RANKS * (rows + columns)
        anchor = torch.zeros(1, dtype=dtype, device=DEVICE)
        self.all = [
            torch.randn(size, device=DEVICE).mul_(0.3).to(dtype) for _ in range(sum(adapters))
        ]
        self.begins = [sum(adapters[:i]) for i in range(len(adapters))]
        self.counts, self.users = adapters, users

        # Before and behind them are slabs of another kind, which must not be read.
        self.other = torch.full((size,), float("nan"), dtype=dtype, device=DEVICE)

        def put(values, kind):
            return torch.tensor(values, dtype=kind, device=DEVICE)

        self.rows = RowSlabs(
            anchor,
            put([distance(s, anchor) for s in (self.other, *self.all, self.other)], torch.int64),
            put([0 if u < 0 else 1 + self.begins[u] for u in users], torch.int32),
            put([0 if u < 0 else adapters[u] for u in users], torch.int32),
        )

    def at(self, name):
        a, b, *_ = self.places[name]
        return a, b

    def product(self, name, x):
        """The change of a layer for each row of ``x``, in float64."""
        a, b, rows, columns = self.places[name]
        out = x.new_zeros((len(x), rows), dtype=torch.float64)
        for m, user in enumerate(self.users):
            for slab in self.all[self.begins[user] :][: self.counts[user]] if user >= 0 else ():
                left = slab[a : a + RANKS * columns].view(RANKS, columns).double()
                right = slab[b : b + RANKS * rows].view(rows, RANKS).double()
                out[m] += right @ (left @ x[m].double())
        return out

    def shrunk(self, name, x):
        """x @ A.T as a decode step keeps it, with NaN where nothing may be read."""
        a, _, _, columns = self.places[name]
        out = torch.full_like(shrunk_rows(len(x), x.device), float("nan"))
        for m, user in enumerate(self.users):
            for i in range(self.counts[user]) if user >= 0 else ():
                slab = self.all[self.begins[user] + i]
                left = slab[a : a + RANKS * columns].view(RANKS, columns)
                out[m, i * RANKS : (i + 1) * RANKS] = left.float() @ x[m].float()
        return out


CASES = [
    ([1, 1], [1, -1, 0, 1, -1]),
    pytest.param([8, 1, 3], [0, 2, -1, 2, 1], marks=pytest.mark.slow),
    pytest.param([1] * 9, [*range(9), -1, 4], marks=pytest.mark.slow),
    pytest.param([2], [-1, -1], marks=pytest.mark.slow),
]


def near(got, wanted, dtype=torch.float32):
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert got.shape == wanted.shape
    assert (got.double() - wanted).norm() <= tolerance * wanted.norm()


@pytest.mark.parametrize(("adapters", "users"), CASES)
def test_many_rows(adapters, users):
    # Prompts: several tokens of each user.
    slabs = Slabs(adapters, [user for user in users for _ in range(17)])
    x = torch.randn(len(slabs.users), DIM, device=DEVICE)
    y = torch.randn(len(x), HIDDEN + 3, device=DEVICE)[:, 1:-2]
    wanted = y.double() + slabs.product("up", x)
    a_at, b_at = slabs.at("up")
    poisoned = torch.full((1, len(x), 128), float("nan"), device=DEVICE)
    shrunk = shrink_rows(x, slabs.rows, a_at, out=poisoned)
    activated = y.clone()
    expand_rows(shrunk, slabs.rows, b_at, add_to=y)
    near(y, wanted)
    expand_rows(shrunk, slabs.rows, b_at, add_to=activated, gelu=True)
    near(activated, F.gelu(wanted, approximate="tanh"))


def test_many_rows_of_long_inputs():
    """The inputs are multiplied in parts."""
    anchor = torch.zeros(1, device=DEVICE)
    inputs, rows = 1030, 3
    slab = torch.randn(RANKS * (inputs + rows), device=DEVICE)
    put = torch.tensor([distance(slab, anchor)], device=DEVICE)
    ones = torch.tensor([0, 1], dtype=torch.int32, device=DEVICE)
    own = RowSlabs(anchor, put, torch.zeros_like(ones), ones)
    x, y = torch.randn(2, inputs, device=DEVICE), torch.zeros(2, rows, device=DEVICE)
    expand_rows(shrink_rows(x, own, 0), own, RANKS * inputs, add_to=y)
    a, b = slab[: RANKS * inputs].view(RANKS, -1), slab[RANKS * inputs :].view(-1, RANKS)
    wanted = (x.double() @ a.double().T) @ b.double().T
    assert not y[0].any()
    near(y[1], wanted[1])


@pytest.mark.parametrize(("adapters", "users"), CASES)
@pytest.mark.parametrize("begin", [32, pytest.param(41, marks=pytest.mark.slow)])
@pytest.mark.parametrize("held_rows", [skinny_linear_module.HELD_ROWS, 0])
def test_the_gemm_of_a_decode_step(adapters, users, begin, held_rows, monkeypatch):
    """Also where the first tile of the hidden layer begins with other columns, with slabs that are loaded early and
    without."""
    monkeypatch.setattr(skinny_linear_module, "HELD_ROWS", held_rows)
    slabs = Slabs(adapters, users, first=begin)
    x = torch.randn(len(users), DIM, device=DEVICE)
    weight = torch.randn(begin + HIDDEN, DIM, device=DEVICE)
    bias = torch.randn(begin + HIDDEN, device=DEVICE)
    count = adapter_parts(len(x), weight, begin)
    parts = torch.full((count, len(x), 128), float("nan"), device=DEVICE)
    (_, b_at), (a_at, _) = slabs.at("up"), slabs.at("down")
    hidden = ColumnChange(slabs.rows, b_at, slabs.shrunk("up", x))
    # The first columns have another change.
    first = ColumnChange(slabs.rows, slabs.at("first")[1], slabs.shrunk("first", x))
    adapted = GemmChanges(begin, first, hidden, a_at, parts)
    out = skinny_linear(x, weight, bias, gelu_from=begin, adapted=adapted)
    plain = skinny_linear(x, weight, bias, gelu_from=begin)
    wanted = x.double() @ weight.double().T + bias.double()
    wanted[:, :begin] += slabs.product("first", x)
    wanted[:, begin:] = F.gelu(wanted[:, begin:] + slabs.product("up", x), approximate="tanh")
    near(out, wanted)
    others = [m for m, user in enumerate(users) if user < 0]
    assert torch.equal(out[others], plain[others])
    sums, known = parts.sum(0), slabs.shrunk("down", out[:, begin:])
    assert torch.equal(sums.isnan(), known.isnan())
    near(sums.nan_to_num(), known.nan_to_num())


@pytest.mark.parametrize(("adapters", "users"), CASES)
@pytest.mark.parametrize("mlp_only", [False, True])
def test_the_layer_norm_of_a_decode_step(adapters, users, mlp_only):
    """``mlp_only``: there are no other changes than those of MLPs, whose first slabs wait in registers."""
    slabs = Slabs(adapters, users)
    rows = len(users)
    x, hidden = torch.randn(rows, DIM, device=DEVICE), torch.randn(rows, HIDDEN, device=DEVICE)
    parts = [torch.randn(2, rows, DIM, device=DEVICE), torch.randn(rows, DIM, device=DEVICE)]
    weight, shift = torch.randn(DIM, device=DEVICE), torch.randn(DIM, device=DEVICE)
    owed = torch.randn(DIM, device=DEVICE)
    of_hidden = slabs.shrunk("down", hidden)
    sums = torch.stack([of_hidden * 0.25, of_hidden * 0.5, of_hidden * 0.25])
    stream, plain_stream = x.clone(), x.clone()
    shrunk = [shrunk_rows(rows, x.device).fill_(float("nan")) for _ in range(2)]
    (up_a, _), (_, down_b) = slabs.at("up"), slabs.at("down")
    first = slabs.at("first")
    attended = torch.randn(rows, 3 * DIM, device=DEVICE)[:, 7 : 7 + DIM]
    before = torch.randn(rows, DIM, device=DEVICE)
    u = before.clone()
    whole = (WholeChange(slabs.rows, attended, *first), WholeChange(slabs.rows, u, *first))
    to_write = (
        NextProducts(slabs.rows, shrunk[0], up_a),
        NextProducts(slabs.rows, shrunk[1], first[0]),
    )
    adapted_layer_norm(
        stream, parts, owed, weight, shift, out=u,
        summed=SummedChange(slabs.rows, sums, down_b),
        whole=() if mlp_only else whole,
        shrunk=to_write[:1] if mlp_only else to_write,
    )  # fmt: skip
    wanted = x.double() + owed + parts[0].double().sum(0) + parts[1]
    wanted += slabs.product("down", hidden)
    if not mlp_only:
        wanted += slabs.product("first", attended) + slabs.product("first", before)
    near(stream, wanted)
    near(u, F.layer_norm(wanted, (DIM,), weight.double(), shift.double()))
    plain = add_layer_norm(plain_stream, parts, owed, weight, shift)
    others = [m for m, user in enumerate(users) if user < 0]
    assert torch.equal(stream[others], plain_stream[others])
    if others and DEVICE == "cuda":  # Its two kernels add up a row in different orders.
        near(u[others], plain[others].double())
    else:
        assert torch.equal(u[others], plain[others])
    names = ("up",) if mlp_only else ("up", "first")
    for name, got in zip(names, shrunk, strict=False):
        known = slabs.shrunk(name, u)
        assert torch.equal(got.isnan(), known.isnan())
        near(got.nan_to_num(), known.nan_to_num())
