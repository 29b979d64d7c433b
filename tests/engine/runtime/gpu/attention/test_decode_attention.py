"""Decode attention by FlashInfer's way: what is planned, where keys go, and the same answers as by our own kernel.

FlashInfer itself needs a GPU (tests/gpu/test_attention_paths.py): a stand-in attends here.
"""

import pytest
import torch
from torch.nn.attention import SDPBackend

from kestrel_engine.runtime.gpu import parts
from kestrel_engine.runtime.gpu.attention import blocks as block_attention
from kestrel_engine.runtime.gpu.attention import prefill as prefill_attention
from kestrel_engine.runtime.gpu.attention.blocks import BlockAttention
from kestrel_engine.runtime.gpu.attention.decode import AttentionInputs, FlashInferRows
from kestrel_engine.runtime.gpu.attention.prefill import AttentionChoice, choose_attention
from kestrel_engine.runtime.gpu.graphs import ladder
from kestrel_engine.runtime.gpu.prefill import graphs as prefill_graphs
from kestrel_engine.types.model_config import TextConfig
from kestrel_engine.types.step import PREVIOUS, EncodeSlice, Row, RuntimeLimits, StepPlan
from tests.engine.runtime.gpu.attention.flashinfer_stand_in import Wrapper, stand_in
from tests.engine.runtime.gpu.small_models import gpu_runtime, picture, small_model, torch_runtime
from tests.engine.runtime.gpu.test_gpu_runtime import SIZES, TEXT, Talk, answers, image
from tests.kernels.attention.attention_cases import Case, decode_reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def rows_of(case: Case) -> list[Row]:
    tables = case.page_table[case.row_seq.long()].tolist()
    return [
        Row(number, (PREVIOUS,), position, tuple(table), None)
        for number, (position, table) in enumerate(
            zip(case.positions.tolist(), tables, strict=True)
        )
    ]


def planned(case: Case, *, max_rows: int) -> FlashInferRows:
    num_pages = len(case.keys) // case.page_size
    free = set(range(num_pages)) - set(case.page_table.flatten().tolist())
    limits = RuntimeLimits(
        num_pages=num_pages,
        page_size=case.page_size,
        max_batch_size=max_rows,
        max_seq_length=case.page_table.shape[1] * case.page_size,
        vocab_size=10,
    )
    return FlashInferRows(
        stand_in(DEVICE),
        TextConfig(n_heads=case.num_heads, dim=case.num_heads * case.head_dim),
        limits,
        case.page_table.shape[1],
        spare_page=min(free),
    )


def run(attention: FlashInferRows, case: Case, padded: int) -> torch.Tensor:
    """[M, H*D]: as in a step, the result stands where v was."""
    dim = case.num_heads * case.head_dim
    spare = padded - len(case.qkv)
    qkv = torch.cat([case.qkv, torch.ones(spare, case.qkv.shape[1], device=DEVICE)])
    tau = case.tau
    if tau is not None:
        content = torch.cat([tau[0], torch.zeros(spare, tau[0].shape[1], device=DEVICE)])
        tau = content, tau[1]
    ints = torch.zeros(padded, dtype=torch.int32, device=DEVICE)
    out = qkv[:, 2 * dim : 3 * dim]
    rows = ints, ints, case.page_table
    pool, angles = (case.keys, case.values), (case.cos, case.sin)
    attention(AttentionInputs(qkv, pool, rows, angles, tau, out))
    assert qkv[:, 3 * dim :].equal(case_padding(case, spare, dim)), "the MLP's columns are its own"
    return out


def case_padding(case: Case, spare: int, dim: int) -> torch.Tensor:
    extra = case.qkv[:, 3 * dim :]
    return torch.cat([extra, torch.ones(spare, extra.shape[1], device=DEVICE)])


@pytest.mark.parametrize("tau", [False, True])
@pytest.mark.parametrize("page_size", [1, 5])
def test_rows_of_all_lengths_and_padding(tau, page_size):
    positions = [0, 4, 5, 23]
    case = Case.make(
        positions, page_size=page_size, tau=tau, extra_columns=7, device=str(DEVICE), seed=3
    )
    expected, k, v = decode_reference(case)
    attention = planned(case, max_rows=6)
    attention.plan(6, rows_of(case))
    got = run(attention, case, 6)
    torch.testing.assert_close(got[:4].double(), expected, atol=2e-6, rtol=1e-5)
    assert got.isfinite().all(), "padding attends to itself"
    slots = case.own_slots()
    torch.testing.assert_close(case.keys[slots].double(), k, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(case.values[slots].double(), v, atol=2e-6, rtol=1e-5)


def test_what_is_planned_stays_where_a_captured_graph_looks():
    case = Case.make([9, 10], page_size=5, tau=False, device=str(DEVICE))
    attention = planned(case, max_rows=4)
    first, second = rows_of(case)
    pages = [row.page_table for row in (first, second)]
    attention.plan(4, [first, second])
    attention.plan(1, [second])
    small, large = sorted(Wrapper.made, key=lambda made: len(made.last))
    places = [large.pages.data_ptr(), large.bounds.data_ptr(), large.last.data_ptr()]
    assert large.bounds.tolist() == [0, 2, 5, 6, 7] and large.last.tolist() == [5, 1, 1, 1]
    spare = large.pages[5].item()
    assert large.pages[:7].tolist() == [*pages[0][:2], *pages[1][:3], spare, spare]
    assert spare not in {page for table in pages for page in table}
    assert small.bounds.tolist() == [0, 3] and small.last.tolist() == [1]
    attention.plan(4, [second])
    assert len(Wrapper.made) == 2
    assert places == [large.pages.data_ptr(), large.bounds.data_ptr(), large.last.data_ptr()]
    assert large.bounds.tolist() == [0, 3, 4, 5, 6] and large.last.tolist() == [1, 1, 1, 1]


def test_names_and_who_computes_then(monkeypatch):
    cuda = torch.device("cuda")
    library = stand_in(DEVICE)
    kernels = set()
    library.library.BatchPrefillWithPagedKVCacheWrapper = lambda *_, backend: kernels.add(backend)
    monkeypatch.setattr(prefill_attention, "FlashInfer", lambda device, dtype: library)
    monkeypatch.setattr(block_attention, "works", lambda backend, probe: True)
    monkeypatch.setattr(block_attention.torch, "zeros", lambda *_, **__: None)
    chosen = {
        name: choose_attention(name, cuda, torch.bfloat16)
        for name in ("auto", "flashinfer", "triton", "torch")
    }
    assert {name: choice.name for name, choice in chosen.items()} == {
        "auto": "torch",
        "flashinfer": "flashinfer",
        "triton": "torch",
        "torch": "torch",
    }
    assert [name for name, choice in chosen.items() if choice.captures] == ["auto", "triton"]
    assert [name for name, choice in chosen.items() if choice.decode] == ["flashinfer"]
    assert kernels == {"fa2"}, "fa3 carries NaN from one sequence to another"
    cudnn = SDPBackend.CUDNN_ATTENTION
    assert chosen["auto"].own_blocks == BlockAttention(True, cudnn)
    assert chosen["torch"].own_blocks == BlockAttention(False, cudnn)
    assert choose_attention("auto", cuda, torch.float32).own_blocks == BlockAttention()


@pytest.mark.parametrize(
    ("name", "family"),
    [
        pytest.param("torch", "moondream2", marks=pytest.mark.slow),
        pytest.param("flashinfer", "moondream3", marks=pytest.mark.slow),
        pytest.param("flashinfer", "moondream2", marks=pytest.mark.slow),
        pytest.param("torch", "moondream3", marks=pytest.mark.slow),
    ],
)
def test_the_runtime_answers_as_the_reference_without_our_text_kernel(monkeypatch, family, name):
    def never(*_, **__):
        raise AssertionError("a captured pass's kernel")

    def choose(_, device, dtype, pool):
        assert pool == dtype
        library = stand_in(device, dtype)
        return AttentionChoice(captures=False, decode=library)

    monkeypatch.setattr(prefill_graphs, "paged_text", never)
    if name == "flashinfer":
        monkeypatch.setattr(parts, "choose_attention", choose)
    config, tensors = small_model(family)
    reference = torch_runtime(config, tensors, **SIZES)
    # No graph can capture the stand-in for FlashInfer, which reads numbers from the device.
    captured = name != "flashinfer"
    tested = gpu_runtime(config, tensors, attention=name, cuda_graphs=captured, **SIZES)
    single = picture("single", (1, 1), config, seed=2)
    wanted, got = [], []
    for each, out in ((reference, wanted), (tested, got)):
        each.collect(each.launch(StepPlan(0, encode=(EncodeSlice(single, 0, 2),))))
        talks = [
            Talk(0, [*image(config, "single"), 11, 12], [TEXT] * 5),
            Talk(1, [0, 21, 22, 23, 24], [TEXT] * 3, chunk=3),
            Talk(2, [0, *range(30, 46)], [TEXT] * 3),
        ]
        out.append({n: [t.id for t in tokens] for n, tokens in answers(each, talks).items()})
        each.close()
    assert wanted == got
    if name == "flashinfer":
        # On a CUDA device, the warm-up plans every size.
        planned_sizes = [1, 2, 4] if DEVICE.type == "cpu" else list(ladder(SIZES["max_batch_size"]))
        assert sorted(len(made.last) for made in Wrapper.made) == planned_sizes
