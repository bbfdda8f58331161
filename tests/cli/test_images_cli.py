"""Images on the command line: `generate --image`, and `/image` of a chat."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from bifolio import LLM, SamplingParams
from bifolio.cli.chat_commands import obey
from bifolio.cli.conversation import Conversation
from bifolio.cli.dropped_files import dropped_images, path_of
from bifolio.cli.main import build_app
from cli_runner import CliRunner
from helpers import tiny_folder
from vision.vision_models import gemma3_model, picture


class Notes:
    """A terminal that keeps its remarks."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    path = tmp_path / "a photo.png"
    picture(40, 50, 3).save(path)
    return path


@pytest.mark.full
def test_generate_answers_about_an_image(photo: Path) -> None:
    folder = gemma3_model().folder
    arguments = ["generate", "-m", str(folder), "What?", "--image", str(photo), "-t", "0", "-n", "5", "--json"]
    result = CliRunner().invoke(build_app(), [*arguments, "--ignore-eos"])
    assert result.exit_code == 0, result.output
    content = [{"type": "image", "image": picture(40, 50, 3)}, {"type": "text", "text": "What?"}]
    with LLM(folder) as llm:
        params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
        (expected,) = llm.chat([{"role": "user", "content": content}], params)
    assert json.loads(result.stdout)["outputs"][0]["token_ids"] == expected.outputs[0].token_ids
    url = f"data:image/png;base64,{base64.b64encode(photo.read_bytes()).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What?"}]
    lines = photo.with_name("lines.jsonl")
    lines.write_text(json.dumps({"messages": [{"role": "user", "content": parts}]}))
    arguments = ["generate", "-m", str(folder), "--input", str(lines), "-t", "0", "-n", "5", "--json", "--ignore-eos"]
    result = CliRunner().invoke(build_app(), arguments)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["outputs"][0]["token_ids"] == expected.outputs[0].token_ids


@pytest.mark.full
@pytest.mark.parametrize(("model", "file", "said"), [
    ("text", "photo", "this model reads text only: remove the image"),
    ("images", "missing", "cannot be read: No such file"),
    ("images", "text", "the image is none of PNG"),
])  # fmt: skip
def test_wrong_images_are_named(model: str, file: str, said: str, photo: Path) -> None:
    folder = tiny_folder(tokenizer=True) if model == "text" else gemma3_model().folder
    path = {"photo": photo, "missing": photo.parent / "none.png", "text": photo.parent / "text.png"}[file]
    if file == "text":
        path.write_text("no image")
    result = CliRunner().invoke(build_app(), ["generate", "-m", str(folder), "What?", "--image", str(path), "-n", "1"])
    assert result.exit_code
    assert said in result.output + str(result.exception)


@pytest.mark.full
def test_a_chat_shows_an_image_with_the_next_message(photo: Path) -> None:
    with LLM(gemma3_model().folder, num_blocks=400, max_model_len=400) as llm:
        conversation, notes = Conversation(llm, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)), Notes()
        assert obey(f"/image {photo}", conversation, notes, lambda: None)  # type: ignore[arg-type]
        assert notes.lines == ["a photo.png, 40 x 50 pixels: it goes with the next message"]
        request = conversation.turn("What?", lambda text: None)
        assert [image.pixels.shape for image in request.images] == [(48, 48, 3)]
        second = conversation.turn("And now?", lambda text: None)
        assert len(second.images) == 1
        assert second.metrics.num_cached_tokens >= 16
        assert conversation.regenerate(lambda text: None).sequences[0].token_ids == second.sequences[0].token_ids
        saved = photo.parent / "chat.json"
        conversation.save(str(saved))
        conversation.reset(None)
        conversation.load(str(saved))
        assert llm.chat_prompt(conversation.messages[:-1]).images[0].digest == request.images[0].digest
        session = photo.parent / "chat.session"
        assert "with their part of the cache" in conversation.save(str(session))
        expected = conversation.turn("More?", lambda text: None).sequences[0].token_ids
        llm.reset_prefix_cache()
        assert "tokens from the file" in conversation.load(str(session))
        again = conversation.turn("More?", lambda text: None)
        assert again.sequences[0].token_ids == expected
        assert again.metrics.num_cached_tokens >= 32
        obey(f"/image {photo.parent}/none.png", conversation, notes, lambda: None)  # type: ignore[arg-type]
        assert "cannot be read" in notes.lines[-1]


@pytest.mark.full
def test_inspect_shows_the_tower() -> None:
    result = CliRunner().invoke(build_app(), ["inspect", str(gemma3_model().folder)])
    assert result.exit_code == 0, result.output
    assert "images: tower gemma3, 2 layers of 48, patches of 6 x 6" in result.stdout


def test_dropped_paths_are_images(tmp_path: Path) -> None:
    """As terminals write them: quoted, escaped, as URLs; only those of files, in front of a text."""
    photo, other = tmp_path / "a photo (1).png", tmp_path / "b.JPG"
    for path in (photo, other):
        path.write_bytes(b"")
    escaped = str(photo).replace(" ", "\\ ").replace("(", "\\(").replace(")", "\\)")
    url = "file://" + str(photo).replace(" ", "%20")
    for written in (f"'{photo}'", f'"{photo}"', escaped, url):
        assert dropped_images(written) == ([photo], "")
        assert dropped_images(f"{written} {other}  What is this?") == ([photo, other], "What is this?")
    for text in ("", "/help", f"look at {other}", f"{other}.gif", str(tmp_path), "/" + "x" * 5000, "b.JPG", "/a\0.png",
                 f"{other}?", "it's a 'text"):  # fmt: skip
        assert dropped_images(text) == ([], text.strip())
    assert path_of(str(photo)) == photo
    assert path_of(escaped) == photo
    assert path_of("~/x.png") == Path.home() / "x.png"


@pytest.mark.full
def test_a_chat_takes_dropped_images(photo: Path) -> None:
    """Images alone wait for the next message; with a text behind them they are sent; a text model refuses them."""
    lines = [f"'{photo}'", "What?", f"{str(photo).replace(' ', chr(92) + ' ')} And this?", "/bye"]
    arguments = ["chat", "-m", str(gemma3_model().folder), "-t", "0", "-n", "3", "--json"]
    result = CliRunner().invoke(build_app(), arguments, input="\n".join(lines) + "\n")
    assert result.exit_code == 0, result.output
    answers = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert len(answers) == 2
    assert answers[1]["prompt_tokens"] > answers[0]["prompt_tokens"] + 16
    folder = tiny_folder(tokenizer=True, chat_template="{{ messages[-1].content }}")
    refused = CliRunner().invoke(build_app(), ["chat", "-m", str(folder), "-n", "3", "--json"],
                                 input=f"'{photo}' What?\n/bye\n")  # fmt: skip
    assert "this model reads text only: remove the image" in refused.output
    assert not any(line.startswith("{") for line in refused.stdout.splitlines())
