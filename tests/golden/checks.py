"""What must hold for one golden case or image; used with what the repository keeps and with the complete set."""

import math
from typing import Any

import pytest
import torch

from kestrel_engine.models.text import Moe
from kestrel_engine.skills.base import SkillControl, SkillOutput
from kestrel_engine.skills.objects.locate import LocateControl, LocateOutput
from kestrel_engine.skills.query import ReasoningControl, ReasoningOutput
from kestrel_engine.skills.segment import SegmentControl, SegmentOutput
from kestrel_engine.skills.text.answer import AnswerControl, AnswerOutput
from kestrel_engine.types.requests import Coord, PreparedImage, Size, Token
from kestrel_engine.types.step import MAX_TOP, Row, StepToken
from tests.golden.driver import Feed, Job, pages_for, run_jobs
from tests.golden.goldens import Golden

Case = dict[str, Any]
BLOCK_CASES = ("query.0", "query_noimage.0")


def check_case(golden: Golden, case: Case) -> None:
    """The end of the prompt, and the first object or the stored steps after it."""
    feed = Feed(golden.runtime, pages_for(golden.runtime, 900, seed=7))
    hidden = _check_prefill(golden, case, feed)
    if case["skill"] in ("point", "detect"):
        _check_first_object(golden, case, feed, hidden)
    elif f"{case['id']}.decode_logits" in golden.arrays:
        _check_decode(golden, case, feed)


def _check_prefill(golden: Golden, case: Case, feed: Feed) -> torch.Tensor:
    """Hidden state and logits at the end of the prompt, and the embeddings of its spatial references."""
    model, name = golden.runtime.model, case["id"]
    prompt = golden.prompt(case)
    hidden = feed(*prompt)
    golden.check("hidden", hidden, f"{name}.prefill_hidden")
    golden.check("logits", model.text.logits(hidden[None])[0], f"{name}.prefill_logits")
    coords = [token.value for token in prompt if isinstance(token, Coord)]
    sizes = [(token.width, token.height) for token in prompt if isinstance(token, Size)]
    if coords:
        embedded = model.region.embed_coords(torch.tensor(coords))
        golden.check("ref_embeds", embedded, f"{name}.ref_coord_embeds")
    if sizes:
        embedded = model.region.embed_sizes(torch.tensor(sizes))
        golden.check("ref_embeds", embedded, f"{name}.ref_size_embeds")
    return hidden


def _check_first_object(golden: Golden, case: Case, feed: Feed, hidden: torch.Tensor) -> None:
    """Region logits and bins of a point or detect case's first object, and the decision after it."""
    text, region = golden.runtime.model.text, golden.runtime.model.region
    name, bins, hidden = f"{case['id']}.first", case["bins"][0], hidden[None]
    x = region.coord_logits(hidden)[0]
    golden.check("region_logits", x, f"{name}.x_logits")
    hidden = feed(Coord(bins[0] / 1024))[None]
    golden.check("hidden", hidden[0], f"{name}.y_hidden")
    y = region.coord_logits(hidden)[0]
    golden.check("region_logits", y, f"{name}.y_logits")
    assert [int(x.argmax()), int(y.argmax())] == bins[:2]
    hidden = feed(Coord(bins[1] / 1024))[None]
    if case["skill"] == "detect":
        golden.check("hidden", hidden[0], f"{name}.size_hidden")
        sizes = region.size_logits(hidden)[0]
        golden.check("region_logits", sizes, f"{name}.size_logits")
        assert sizes.argmax(dim=-1).tolist() == bins[2:]
        hidden = feed(Size(*(2 ** (10 * b / 1023 - 10) for b in bins[2:])))[None]
    golden.check("logits", text.logits(hidden)[0], f"{name}.next_logits")


def _check_decode(golden: Golden, case: Case, feed: Feed) -> None:
    """Logits after each stored token of a text or segment case, the stored tokens being fed."""
    name = case["id"]
    tokens = fed_tokens(case)
    rest = tokens[_check_steps(golden, feed, tokens, f"{name}.decode_logits") :]
    if case["skill"] != "query_reasoning":
        return
    hidden = feed(*rest, *case["answer_prompt_ids"])
    logits = golden.runtime.model.text.logits(hidden[None])[0]
    golden.check("logits", logits, f"{name}.answer_prefill_logits")
    _check_steps(golden, feed, case["answer"]["ids"], f"{name}.answer_decode_logits")


def _check_steps(golden: Golden, feed: Feed, tokens: list[Token], key: str) -> int:
    steps = len(golden.arrays[key])
    hidden = torch.stack([feed(token) for token in tokens[:steps]])
    golden.check("logits", golden.runtime.model.text.logits(hidden), key)
    return steps


def fed_tokens(case: Case) -> list[Token]:
    """What a text or segment case feeds after its prompt, values in place of ids where a region head was read."""
    if case["skill"] == "segment":
        return [_fed_segment_token(token) for token in case["tokens"]]
    if case["skill"] == "query_reasoning":
        pairs = zip(case["reasoning_ids"], case["reasoning_coord_values"], strict=True)
        return [token if value is None else Coord(value) for token, value in pairs]
    return list(case["ids"])


def _fed_segment_token(token: dict[str, Any]) -> Token:
    match token["type"]:
        case "coord":
            return Coord(token["value"])
        case "size":
            return Size(*token["value"])
        case _:
            return int(token["id"])


def check_blocks(golden: Golden, case: Case) -> None:
    """The residual stream after every block, router logits, and the tau factors of block 0."""
    name, text = case["id"], golden.runtime.model.text
    row = Row(0, golden.prompt(case), 0, pages_for(golden.runtime, 800), None)
    batch = golden.runtime.batch([row])
    placement, x = text.place(batch.positions), batch.embeddings
    prompt = slice(case["pos_start"], None)
    router_logits: list[torch.Tensor] = []
    for block in text.blocks:
        u = block.ln(x)
        if isinstance(block.mlp, Moe):
            router_logits.append(block.mlp.router(u)[prompt])
        if block.index == 0 and block.tau is not None:
            of_q, of_v = block.tau.factors(block.qkv(u), placement.log_position)
            golden.check("hidden", of_q[prompt], f"{name}.block0.tau_q")
            golden.check("hidden", of_v[prompt], f"{name}.block0.tau_v")
        x = block(x, placement, batch.attention)
        key = f"{name}.block{block.index}.hidden"
        golden.check("hidden", x[prompt][-len(golden.arrays[key]) :], key)
        if f"{key}_image_rows" in golden.arrays:
            rows = golden.expected["hidden_image_rows"]
            golden.check("hidden", x[rows], f"{key}_image_rows")
    if router_logits:
        golden.check("logits", torch.stack(router_logits), f"{name}.router_logits")


def check_vision(golden: Golden, name: str, picture: PreparedImage) -> None:
    """Every stage of the vision tower on one image, as far as rows of it are stored."""
    expected, rows = golden.expected["vision"][name], golden.expected["rows"]
    vision, tiling = golden.runtime.model.vision, tuple(expected["tiling"])
    assert picture.tiling == tiling
    features = vision.encode_crops(torch.from_numpy(picture.crops))
    stitched = vision.stitch(features[1:], tiling)
    assert list(stitched.shape[:2]) == expected["reconstructed_hw"]
    pooled = vision.pool(stitched)
    embedding = golden.runtime.images[name]  # The runtime has encoded it.
    samples = torch.stack([stitched[y, x] for y, x in expected["reconstructed_sample_yx"]])
    golden.check("crop_features", samples, f"vision.{name}.reconstructed_samples")
    kept = features[rows.get("crop_features_crops", slice(None))]
    stages = {
        "crop_features": (features, kept[:, rows["crop_features_rows"]]),
        "pooled": (pooled, pooled[rows["pooled_rows"]]),
        "image_emb": (embedding, embedding[rows["image_emb_rows"]]),
    }
    for what, (whole, some) in stages.items():
        key = f"vision.{name}.{what}"
        assert key in golden.arrays or f"{key}_rows" in golden.arrays
        if key in golden.arrays:
            golden.check(what, whole, key)
        if f"{key}_rows" in golden.arrays:
            golden.check(what, some, f"{key}_rows")


def new_job(golden: Golden, case: Case) -> Job:
    """A case as a request: its prompt, its skill's control and output, and the most tokens it may sample."""
    context, most = golden.context, case.get("max_tokens", 0)
    control: SkillControl = AnswerControl(context)
    output: SkillOutput = AnswerOutput("answer", context)
    match case["skill"]:
        case "query_reasoning":
            control, output = (
                ReasoningControl(most, most, context, control),
                ReasoningOutput(context, most),
            )
            most = 2 * most + 1
        case "point" | "detect" as skill:
            boxes, objects = skill == "detect", case["max_objects"]
            control = LocateControl(boxes=boxes, max_objects=objects, model=context.model)
            output = LocateOutput(skill, boxes=boxes)
            most = 3 * objects
        case "segment":
            control, output = SegmentControl(context), SegmentOutput(case["object"], context)
    return Job(golden.prompt(case), control, output, most)


def check_job(case: Case, job: Job) -> None:
    """Ids, stops, bins, values and text of a finished job, exactly as stored."""
    reasons = {"eos": "stop", "max_tokens": "length", "max_objects": "length"}
    ending = case["answer"] if case["skill"] == "query_reasoning" else case
    was_cut = case.get("reasoning_stop") == "max_tokens"
    assert job.finish == ("length" if was_cut else reasons[ending["stop"]])
    output = job.output.output()
    if "reasoning" in output:
        assert output["reasoning"]["finish_reason"] == ("length" if was_cut else "stop")
    match case["skill"]:
        case "point" | "detect" as skill:
            assert len(output[skill]) == len(case["objects"])
            for found, expected in zip(output[skill], case["objects"], strict=True):
                place = {name: value for name, value in found.items() if name != "score"}
                assert place == pytest.approx(expected, abs=1e-6) and 0 <= found["score"] <= 1
            assert bins_of(job) == [b for object_bins in case["bins"] for b in object_bins]
        case "segment":
            assert job.output.token_ids == tuple(t["id"] for t in case["tokens"])
            assert bins_of(job) == [
                b
                for t in case["tokens"]
                for b in ([t["bin"]] if t["type"] == "coord" else t.get("bins", []))
            ]
            values = [value_of(token) for token in job.tokens[: len(case["tokens"])]]
            for value, token in zip(values, case["tokens"], strict=True):
                assert value == pytest.approx(token.get("value"), abs=1e-6)
        case "query_reasoning":
            assert job.output.token_ids == (*case["reasoning_ids"], *case["answer"]["ids"])
            assert output["answer"] == case["answer"]["text"]
            values = [value_of(token) for token in job.tokens[: len(case["reasoning_ids"])]]
            assert values == case["reasoning_coord_values"]
        case _:
            assert job.output.token_ids == tuple(case["ids"])
            assert output["answer"] == case["text"]


def check_tops(golden: Golden, case: Case) -> None:
    """The likeliest ids of the tokens of an answer or a caption: those of the log-softmax of the stored logits."""
    name, context = case["id"], golden.context
    control = AnswerControl(context, top=MAX_TOP)
    after = golden.arrays[f"{name}.decode_logits"]
    job = Job(golden.prompt(case), control, AnswerOutput("answer", context), len(after))
    run_jobs(golden.runtime, [job])
    stored = [golden.arrays[f"{name}.prefill_logits"], *after]
    for index, (token, logits) in enumerate(zip(job.tokens, stored, strict=False)):
        logits = logits.clone()
        logits[list(job.rules[index].suppressed)] = -math.inf
        logprobs = logits.log_softmax(dim=-1)
        expected = logprobs.topk(MAX_TOP)
        assert token.top[0] == (token.id, token.logprob) and len(token.top) == MAX_TOP
        values = torch.tensor([logprob for _, logprob in token.top])
        tolerance = golden.tolerances["fp32"]["logits"]
        torch.testing.assert_close(values, expected.values, **tolerance)
        torch.testing.assert_close(values, logprobs[[i for i, _ in token.top]], **tolerance)
    assert len(job.tokens) > 1


def value_of(token: StepToken) -> float | list[float] | None:
    if isinstance(token.value, Size):
        return [token.value.width, token.value.height]
    return None if token.value is None else token.value.value


def bins_of(job: Job) -> list[int]:
    """The bins behind all values that a job read."""
    bins: list[int] = []
    for token in job.tokens:
        if isinstance(token.value, Coord):
            bins.append(round(token.value.value * 1024))
        elif isinstance(token.value, Size):
            sides = (token.value.width, token.value.height)
            bins += [round((math.log2(side) + 10) / 10 * 1023) for side in sides]
    return bins
