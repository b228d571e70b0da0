"""Plain decoding beside DFlash, in the browser: `python examples/gradio_demo.py`.

Each round's accepted candidates get a colour; tokens without one are the target's own. It needs the extra demo-ui:
pip install -e '.[demo,demo-ui]'
"""

import time
from concurrent.futures import ThreadPoolExecutor
from html import escape

import gradio as gr
from models import load, options_for
from transformers import TextIteratorStreamer

QUESTION = (
    "A box holds 12 eggs. A farmer fills 10 boxes and has 5 eggs left over. How many eggs did the farmer collect?"
)
COLOURS = ("#2e9e6b59", "#3b7dd859")  # of rounds, in turn
STYLE = ".answer { white-space: pre-wrap; line-height: 1.7; min-height: 8em; } .answer mark { color: inherit; }"

options = options_for(__doc__, max_new_tokens=128).parse_args()
target, tokenizer, draft = load(options)


def answer(question, assistant):
    """Yield the text as it grows; return the new tokens, what the speculation did, and the seconds."""
    chat = [{"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    arguments = {"do_sample": False, "max_new_tokens": options.max_new_tokens, "return_dict_in_generate": True}
    start, text = time.perf_counter(), ""
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(
            target.generate, **inputs.to(target.device), assistant_model=assistant, streamer=streamer, **arguments
        )
        running.add_done_callback(lambda _: streamer.end())  # also where it failed
        for piece in streamer:
            text += piece
            yield text
    out = running.result()
    ids = out.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    return ids, getattr(out, "speculation", None), time.perf_counter() - start


def coloured(ids, speculation):
    """The answer with every round's accepted candidates marked."""
    places, place = [(1, None)], 1  # where each piece ends, and its round if the draft guessed it; first the prefill's
    rounds = zip(speculation.acceptance_lengths, speculation.accepted_by_round, strict=True)
    for number, (committed, accepted) in enumerate(rounds, 1):
        places += [(place + accepted, number), (place + committed, None)]
        place += committed
    parts, shown = [], 0
    for end, number in places:
        text = tokenizer.decode(ids[:end], skip_special_tokens=True).rstrip("\ufffd")  # half a character waits
        piece, shown = escape(text[shown:]), max(shown, len(text))
        if number is not None and piece:
            colour = COLOURS[number % 2]
            piece = f'<mark title="accepted in round {number}" style="background: {colour}">{piece}</mark>'
        parts.append(piece)
    return "".join(parts)


def show(text, note=""):
    return f'<div class="answer">{text}</div><p>{note}</p>'


def compare(question):
    """Answer without the draft, then with it; yields both panels."""
    panels, speeds, answers = ["", ""], [], []
    for side, assistant in enumerate((None, draft)):
        steps = answer(question, assistant)
        while True:
            try:
                panels[side] = show(escape(next(steps)))
                yield panels
            except StopIteration as finished:
                ids, speculation, seconds = finished.value
                break
        answers.append(ids)
        speeds.append(len(ids) / seconds)
        note = f"<b>{speeds[-1]:.1f} tokens/s</b>, {len(ids)} tokens"
        if speculation is None:
            panels[side] = show(escape(tokenizer.decode(ids, skip_special_tokens=True)), note)
        else:
            same = "the same answer" if answers[0] == answers[1] else "another answer, as rounding may have it"
            note += f", {speeds[1] / speeds[0]:.2f} times as fast, {same}<br>"
            note += f"{speculation.acceptance_length:.2f} tokens a round: {speculation.rounds} rounds, "
            note += f"{speculation.accepted} of {speculation.drafted} candidates accepted"
            panels[side] = show(coloured(ids, speculation), note)
        yield panels


with gr.Blocks(title="DFlash", analytics_enabled=False) as demo:
    gr.Markdown("# DFlash\nColour: candidates that a round accepted, each round in another. The rest is the target's.")
    question = gr.Textbox(QUESTION, label="Question")
    button = gr.Button("Answer", variant="primary")
    with gr.Row():
        panels = []
        for title in ("Plain decoding", "DFlash"):
            with gr.Column():
                gr.Markdown(f"### {title}")
                panels.append(gr.HTML(show("")))
    gr.on([button.click, question.submit], compare, question, panels, concurrency_limit=1)

if __name__ == "__main__":
    for assistant in (None, draft):  # the first answer on a machine is a slow one
        for _ in answer("Hello", assistant):
            pass
    demo.launch(css=STYLE, show_error=True)
