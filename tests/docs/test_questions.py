"""What users of mixed precision ask, the heading that answers each, and that the search of the site finds it."""

import re
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from docs.test_site import site as site
from record.report.browser import chromium
from support.cells import WHOLE

pytestmark = pytest.mark.slow

#: a question → where it is answered: the page, and the heading's anchor; an empty one is the whole page
ANSWERS = {
    "loss is nan in fp16, which module is it": "how-to/nan.html",
    "loss scale keeps falling": "how-to/nan.html",
    "bf16 is not faster than fp32": "how-to/index.html#bf16-is-not-faster-than-fp32",
    "bf16 or fp16, which mode on my GPU": "how-to/pick-a-mode.html",
    "cuda out of memory": "how-to/out-of-memory.html",
    "keep layer norm in fp32": "how-to/pins.html",
    "which modules must stay in fp32": "how-to/pins.html#find-which-modules-to-pin",
    "gradient clipping with amp": "how-to/migrate.html",
    "does it work with torch.compile": "how-to/does-it-work-with.html",
    "flash attention sdpa": "how-to/does-it-work-with.html#attention",
    "muon optimizer": "how-to/does-it-work-with.html#muon",
    "gradient penalty autograd.grad": "how-to/does-it-work-with.html#gradient-penalty",
    "export to safetensors from_pretrained": "how-to/does-it-work-with.html#export",
    "hugging face trainer accelerate": "how-to/does-it-work-with.html#other-trainers",
    "apple mps rocm tpu": "how-to/does-it-work-with.html#other-devices",
    "qlora quantized weights": "how-to/lora.html#qlora",
    "fsdp2 wrap": "how-to/fsdp2.html",
    "deepspeed json config": "how-to/deepspeed.html",
    "resume checkpoint under another strategy": "reference/strategies.html#checkpoints",
    "fp8 recipe on h100": "how-to/fp8.html",
    "lightningcli yaml plugins": "how-to/lightning-cli.html",
    "slurm cluster": "how-to/cluster.html",
    "wandb logger": "how-to/loggers.html",
    "learning rate schedule skipped step": "explanation/mixed-precision.html",
    "how many gpus for 7b": "PARALLELISM_GUIDE.html",
}


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        pass


#: the others at night: a heading that goes is seen at once
FEW = [*ANSWERS][:3]


@pytest.fixture(scope="module")
def search(site: Path) -> Iterator[Callable[[str], list[str]]]:
    """The search box of the served site in a real browser: the pages that it lists, first ones first."""
    with chromium() as browser, ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        home = f"http://127.0.0.1:{server.server_port}/"
        page = browser.new_page()
        page.set_default_timeout(20_000)

        def found(question: str) -> list[str]:
            page.goto(f"{home}index.html?q={question}")
            page.wait_for_function(
                "() => / document/.test(document.querySelector('.md-search-result__meta').innerText)"
            )
            links = page.eval_on_selector_all(".md-search-result__item > a", "(all) => all.map((one) => one.href)")
            return [re.sub(r"[?#].*", "", link).removeprefix(home) for link in links]

        yield found
        server.shutdown()


def test_every_answer_is_a_heading(site: Path) -> None:
    for answer in ANSWERS.values():
        page, _, anchor = answer.partition("#")
        assert not anchor or f'id="{anchor}"' in (site / page).read_text(encoding="utf-8"), answer


@pytest.mark.parametrize("question", [*FEW, *(pytest.param(one, marks=WHOLE) for one in ANSWERS if one not in FEW)])
def test_the_search_finds_the_answer_in_its_first_three(question: str, search: Callable[[str], list[str]]) -> None:
    first = list(dict.fromkeys(search(question)))[:3]
    assert ANSWERS[question].partition("#")[0] in first, first
