"""Several images, folders, addresses; --save; forgotten words; suggestions; chat, models, completion."""

import io
import json
import shutil
import subprocess

import pytest
from PIL import Image

from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_client.commands.requests import inputs
from kestrel_client.commands.terminal import styled
from kestrel_grpc.cli.program import COMMANDS, main, whole_parser
from tests.client.commands.test_stored_images import IMAGE
from tests.client.commands.test_stored_images import kestrel as kestrel
from tests.client.images.test_fetching import web as web

ARGUMENTS = ["--temperature", 0, "--max-tokens", 4]


@pytest.fixture
def folder(tmp_path):
    """Two images, a text and a folder of one image."""
    for name in ("b.jpg", "a.JPG", "deep/c.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(IMAGE, tmp_path / name)
    (tmp_path / "notes.txt").write_text("no image")
    return tmp_path


async def test_folders_patterns_and_several_files(kestrel, folder):
    status, told, errors = await kestrel("detect", folder, folder / "deep/*.png", "cat")
    assert (status, errors) == (0, "")
    titles = [line for line in told.splitlines() if line.endswith(":")]
    assert titles == [f"{folder}/{name}:" for name in ("a.JPG", "b.jpg", "deep/c.png")]
    status, told, _ = await kestrel("caption", folder, "long", "--json", *ARGUMENTS)
    lines = [json.loads(line) for line in told.splitlines()]
    assert [line["image"] for line in lines] == [f"{folder}/a.JPG", f"{folder}/b.jpg"]
    status, told, _ = await kestrel("query", folder, "what?", "--stream", "--json", *ARGUMENTS)
    finals = [line for line in map(json.loads, told.splitlines()) if "final" in line]
    assert len(finals) == 2 and finals[0]["image"].endswith("a.JPG")
    status, told, _ = await kestrel("analyze", folder, "--detect", "cat", "--json")
    assert len(told.splitlines()) == 2
    status, told, _ = await kestrel("put", folder)
    assert status == 0 and len(set(told.split())) == 1  # the same image twice


async def test_one_question_about_all_images_together(kestrel, folder):
    Image.new("RGB", (30, 20)).save(folder / "deep/c.png")
    asked = ["query", folder / "b.jpg", folder / "deep", "same?", "--together", *ARGUMENTS]
    status, told, errors = await kestrel(*asked, "--json")
    assert status == 0 and len(told.splitlines()) == 1, errors
    seen = json.loads(told)["images"]
    assert [image["size"]["width"] for image in seen] == [857, 30]
    status, streamed, _ = await kestrel(*asked, "--stream")
    assert status == 0 and streamed.strip() == json.loads(told)["answer"].strip()
    status, _, errors = await kestrel("query", *[folder / "b.jpg"] * 4, "same?", "--together")
    assert status == 1 and "send at most 3 with this text" in errors


async def test_put_stores_the_other_images_if_one_is_refused(kestrel, folder):
    notes = folder / "notes.txt"
    status, told, errors = await kestrel("put", notes, folder / "a.JPG", folder / "deep")
    assert status == 1 and len(told.split()) == 2
    assert errors.startswith(f"failed: {notes}: is not in a supported format")


async def test_a_skill_that_is_misspelt_is_suggested(kestrel):
    status, _, errors = await kestrel("run", "quer", IMAGE)
    assert status == 1 and "did you mean query? [NOT_FOUND]" in errors


async def test_an_address_is_fetched_by_the_client(kestrel, web):
    status, _, errors = await kestrel("caption", f"{web}/nowhere")
    assert status == 1 and "404 Not Found" in errors
    status, _, errors = await kestrel("caption", f"{web}/image")
    assert status == 1 and "not in a supported format" in errors  # the server got its bytes


async def test_one_of_several_that_fails_leaves_the_others_alone(kestrel, folder):
    status, told, errors = await kestrel(
        "detect", folder / "a.JPG", folder / "notes.txt", IMAGE, "cat"
    )
    assert status == 1
    assert told.count("px)") >= 2
    assert errors.startswith(f"failed: {folder}/notes.txt: ")


async def test_words_may_stand_behind_flags(kestrel):
    status, told, _ = await kestrel("detect", "--max-objects", 1, IMAGE, "--json", "cat")
    assert status == 0 and json.loads(told)["searches"][0]["object"] == "cat"
    status, told, _ = await kestrel("caption", IMAGE, "--json", *ARGUMENTS, "short")
    assert status == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["query", "{picture}"], "no question is given; "),
        (["query", "picture.jpg"], "no question is given; 'picture.jpg' is an image"),
        (["query"], "no question is given: kestrel-grpc query IMAGE QUESTION"),
        (["detect", "{picture}", "{picture}"], "no object is given"),
        (["detect", "cat"], "no image is given: kestrel-grpc detect IMAGE OBJECT"),
        (["caption"], "no image is given"),
        (["caption", "short"], "no image is given"),
        (["analyze", "--detect", "cat"], "no image is given"),
        (["qurey", "x"], "unknown command 'qurey'; did you mean query?"),
        (["zzz"], "the commands are serve, cluster, "),
        (["query", "x", "--modle", "y"], "unknown flag --modle; did you mean --model?"),
        (
            ["serve", "--tls-client-crl", "x"],
            "unknown flag --tls-client-crl; the file of --auth-tokens",
        ),
        (["replay", "x", "--in-process"], "unknown flag --in-process; start serve"),
        (["serve", "--host", "0.0.0.0"], "unknown flag --host; give --listen HOST:PORT"),
        (["serve", "--port=80"], "unknown flag --port=80; give --listen HOST:PORT"),
        (["query", "x", "--port", "80"], "unknown flag --port; give --server HOST:PORT"),
        (["admin", "drain", "--sever", "a:1"], "unknown flag --sever; did you mean --server?"),
        (["query", "x", "--priority", "hihg"], "choose from low, normal, high; did you mean high?"),
        (["eval", "scenes", "--seconds", "3"], "unknown flag --seconds (see"),
        (["caption", "{picture}", "huge"], "nor a length; the lengths are short, normal, long"),
        (["query", "x", "--server", "http://127.0.0.1:1"], "gRPC takes HOST:PORT: 127.0.0.1:1"),
        (["models", "remove"], "name the model to remove"),
        (["models", "list"], "'list': must be downloaded"),
    ],
)
def test_wrong_usage_is_one_line_with_what_to_write(capsys, arguments, words):
    named = [word.format(picture=IMAGE) for word in arguments]
    try:
        status = main(named)
    except SystemExit as error:
        status = error.code
    (line,) = capsys.readouterr().err.splitlines()
    assert status == 2 and words in line


@pytest.mark.parametrize(
    "words",
    [
        ["--server", "here:1", "--tls", "drain"],
        ["drain", "--server", "here:1", "--tls"],
        ["--server", "here:1", "drain", "--tls"],
        ["--server", "there:1", "drain", "--server", "here:1", "--tls"],
        ["drain", "--tls", "--server=here:1"],
    ],
)
def test_flags_of_the_server_before_and_behind_the_action(words, monkeypatch):
    monkeypatch.setenv("KESTREL_SERVER", "elsewhere:1")
    args = whole_parser(["admin"])[0].parse_args(["admin", *words])
    assert (args.action, args.server, args.tls, args.ca) == ("drain", "here:1", "on", None)
    args = whole_parser(["admin"])[0].parse_args(["admin", "profile", "--steps", "3"])
    assert (args.server, args.tls, args.steps) == ("elsewhere:1", "off", 3)


@pytest.mark.parametrize(
    ("words", "tls", "image"),
    [
        (["--tls", "a.jpg", "cat"], "on", "a.jpg"),
        (["--tls", "off", "a.jpg", "cat"], "off", "a.jpg"),
        (["--tls=on", "a.jpg", "cat"], "on", "a.jpg"),
        (["a.jpg", "cat", "--tls"], "on", "a.jpg"),
        (["--ca", "x", "--", "--tls", "cat"], "off", "--tls"),
    ],
)
def test_a_bare_flag_does_not_take_the_image(words, tls, image):
    args = whole_parser(["detect"])[0].parse_args(["detect", *words])
    assert (args.tls, args.words) == (tls, [image, "cat"])


def test_a_bare_task_does_not_take_the_image():
    args = whole_parser(["analyze"])[0].parse_args(["analyze", "--caption", "a.jpg"])
    assert (args.words, args.tasks) == (["a.jpg"], [("caption", "normal")])


def test_a_bare_setting_of_the_server():
    args = whole_parser(["serve"])[0].parse_args(["serve", "--insecure-listen", "--listen", "a:1"])
    assert (args.insecure_listen, args.listen) == ("on", ["a:1"])


async def test_a_model_that_is_nearly_named(kestrel):
    status, _, errors = await kestrel("query", "hi", "--model", "fakee")
    assert status == 1 and "this server serves fake; did you mean fake?" in errors


async def test_a_deadline_and_a_full_queue_in_plain_words(kestrel, monkeypatch):
    status, _, errors = await kestrel("query", "hi", "--timeout", "0.00001")
    assert status == 1 and "no answer within 1e-05 s; increase --timeout" in errors
    import grpc

    from kestrel_client import OverloadedError
    from kestrel_client.commands.connection import failure_text

    full = OverloadedError(
        grpc.StatusCode.RESOURCE_EXHAUSTED, "max_queue=1", reason="QUEUE_FULL", retry_after_s=1.5
    )
    assert failure_text(full, "here:1", None) == (
        "server here:1 is busy; try again in 1.5 s [RESOURCE_EXHAUSTED]"
    )


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["query", IMAGE, "what?", "--temperature", -1], "--temperature: -1.0 is not in"),
        (["query", IMAGE, "what?", "--region", "0,0,0,0"], "--region: needs x_min < x_max"),
        (["query", IMAGE, "what?", "--regex", "("], "--regex: unclosed group"),
        (["detect", IMAGE, "a", "--tiles", "2x3", "--tile-overlap", 0.9], "--tile-overlap: 0.9"),
        (["gaze", IMAGE, "--eye", "0.5,2"], "--eye: 2.0 is not a number in"),
        (["detect", IMAGE, " "], "detect.objects[0]: must not be empty"),
        (["analyze", IMAGE, "--caption", "--max-tokens", 0], "failed: --max-tokens: 0 is not"),
        (["count", "--detect", "cat"], "no image is given, and only --query needs none"),
        (["caption", "notes.txt"], "notes.txt: is not in a supported format"),
        (["caption", "-x.jpg"], "unknown flag -x.jpg; a file of that name is ./-x.jpg"),
    ],
)
async def test_errors_name_what_the_user_wrote(kestrel, folder, monkeypatch, capsys, words, why):
    monkeypatch.chdir(folder)
    shutil.copy("a.JPG", "-x.jpg")
    try:
        status, _, errors = await kestrel(*words)
    except SystemExit as usage:
        status, errors = usage.code, capsys.readouterr().err
    told = errors.splitlines()[-1]
    assert status in (1, 2) and (told.partition("error: ")[2] or told).startswith(why)


def test_a_port_of_http_is_told(web, capsys):
    assert main(["models", "--server", web.removeprefix("http://"), "--timeout", "30"]) == 1
    assert "that port speaks another protocol, such as HTTP" in capsys.readouterr().err


def test_thousands_of_images_may_have_one_name():
    """Each has a file of its own. Names that were counted from 1 again would take hours."""
    paths = [f"{number}/frame.jpg" for number in range(20_000)]
    names = inputs.unique_stems([inputs.Input(path, path) for path in ("a/frame-3.jpg", *paths)])
    assert names[:4] == ["frame-3", "frame", "frame-2", "frame-4"]
    assert len(set(names)) == len(names)


async def test_save_says_what_it_wrote(kestrel, folder):
    target = folder / "deep/query.png"
    status, _, errors = await kestrel("query", IMAGE, "what?", *ARGUMENTS, "--save", target)
    assert status == 0 and errors.splitlines()[-1] == f"wrote {target}"
    with Image.open(target) as image:
        assert image.width == 857 and image.height > 783  # question and answer below
    out = folder / "out"
    status, _, errors = await kestrel("analyze", folder, "--detect", "cat", "--save", f"{out}/")
    assert errors.splitlines() == [f"wrote {out}/a.png", f"wrote {out}/b.png"]
    status, _, errors = await kestrel("detect", IMAGE, IMAGE, "cat", "--save", out)
    assert errors.splitlines() == [f"wrote {out}/demo.png", f"wrote {out}/demo-2.png"]
    done = await kestrel(
        "run", "point", IMAGE, "--argument", "object=cat", "--save", out / "run.png"
    )
    assert done[0] == 0 and (out / "run.png").exists()
    _, image_id, _ = await kestrel("put", IMAGE)
    asked = ("detect", image_id.strip(), "cat", "--save", out / "id.png")
    status, _, errors = await kestrel(*asked)
    assert status == 1 and "--save-on FILE" in errors
    status, _, errors = await kestrel(*asked, "--save-on", IMAGE)
    assert status == 0 and (out / "id.png").exists()


async def test_save_to_standard_output(kestrel, monkeypatch):
    written = io.TextIOWrapper(io.BytesIO())
    monkeypatch.setattr("kestrel_client.commands.requests.painted.sys.stdout", written)
    status, _, _ = await kestrel("detect", IMAGE, "cat", "--save", "-", "--json")
    assert status == 0
    with Image.open(io.BytesIO(written.buffer.getvalue())) as image:
        assert image.size == (857, 783)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("/absent/x.png", "there is no folder '/absent'"),
        ("x.unknown", "end its name with .png or .jpg"),
        ("/proc/nothing/", "cannot write"),
    ],
)
async def test_the_target_is_checked_before_anything_is_asked(kestrel, target, words):
    before = kestrel.served.server.records.statistics.methods.copy()
    status, _, errors = await kestrel("detect", IMAGE, "cat", "--save", target)
    assert status == 1 and words in errors
    assert kestrel.served.server.records.statistics.methods == before


async def test_several_images_need_a_folder(kestrel, folder):
    status, _, errors = await kestrel("detect", folder, "cat", "--save", folder / "x.png")
    assert status == 1 and "there are 2 images; give a folder" in errors


async def test_chat(kestrel, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("what?\n\nnever asked\n"))
    status, told, errors = await kestrel("chat", IMAGE, *ARGUMENTS)
    assert not len(kestrel.served.server.images)  # it forgets what it put
    assert (status, told, errors) == await kestrel("query", IMAGE, "what?", *ARGUMENTS)


async def test_chat_sends_the_earlier_turns(kestrel, monkeypatch):
    async def chat(questions, *flags):
        monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(questions)))
        return await kestrel("chat", IMAGE, *ARGUMENTS, *flags)

    _, alone, _ = await kestrel("query", IMAGE, "where?", *ARGUMENTS)
    _, first, _ = await kestrel("query", IMAGE, "what?", *ARGUMENTS)
    history = [pb.Turn(question="what?", answer=first[:-1])]
    request = pb.QueryRequest(query=pb.QueryTask(question="where?", history=history, max_tokens=4))
    request.images.add(encoded=IMAGE.read_bytes())
    request.query.sampling.temperature = 0
    second = (await kestrel.served.vision.Query(request)).answers[0].text
    assert alone[:-1] != second
    assert (await chat(["what?", "where?"]))[1] == f"{first}{second}\n"
    assert (await chat(["what?", "where?"], "--independent"))[1] == first + alone


async def test_chat_leaves_out_turns_that_do_not_fit_the_context(kestrel, monkeypatch):
    long = "x" * 100
    questions = [f"one {long}", f"two {long}", f"three {long}", " ", "never asked"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(questions)))
    status, told, errors = await kestrel("chat", IMAGE, *ARGUMENTS)
    assert status == 0 and told.count("\n") >= 3
    left_out = [line for line in errors.splitlines() if line.startswith("left out")]
    assert left_out[0] == f"left out, to fit the context: one {long}"


def test_downloaded_models_are_listed_and_removed(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.utils._cache_manager.HF_HUB_CACHE", str(tmp_path))
    assert main(["models", "downloaded"]) == 0
    assert "no model is downloaded" in capsys.readouterr().out
    commit = "1" * 40
    folder = tmp_path / "models--vikhyatk--moondream2"
    (folder / "snapshots" / commit).mkdir(parents=True)
    (folder / "snapshots" / commit / "model.safetensors").write_bytes(bytes(1000))
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(commit)
    assert main(["models", "downloaded"]) == 0
    assert capsys.readouterr().out.startswith("moondream2: 0.00 GB in ")
    monkeypatch.setattr("builtins.input", lambda _: "n")
    assert main(["models", "remove", "moondream2"]) == 1
    assert folder.exists() and "nothing was removed" in capsys.readouterr().err
    assert main(["models", "remove", "moondream2", "--yes"]) == 0
    assert not folder.exists()
    assert main(["models", "remove", "moondream2", "--yes"]) == 1
    assert "is not in the hub's cache" in capsys.readouterr().err


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_knows_commands_and_flags(capsys, shell):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(command in script for command in COMMANDS)
    assert "--max-batch-size" in script and "--save" in script
    if shell == "bash":
        assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0


def test_colours_only_where_they_are_seen(monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    assert styled("x", "red", io.StringIO()) == "x"
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert styled("x", "red", io.StringIO()) == "\x1b[31mx\x1b[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert styled("x", "red", io.StringIO()) == "x"


def test_standard_input_is_read_once():
    with pytest.raises(inputs.CommandError, match="named twice"):
        inputs.open_inputs(["-", "-"])
