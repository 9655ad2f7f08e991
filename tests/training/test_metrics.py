import io
import json

import pytest
from rich.console import Console

from transformer_jax.errors import TransformerJaxError
from transformer_jax.training import metrics
from transformer_jax.training.metrics import Clock, MetricLog, Terminal, read_metrics


def record(step, **more):
    return {"step": step, "loss": 2.5, "learning_rate": 1e-3, "grad_norm": 1.0, "tokens_per_second": 9_000.0, **more}


def test_records_after_the_resumed_step_are_cut_off(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = MetricLog(path, after=0)
    for step in (1, 2, 3, 4):
        log.write(record(step))
    with path.open("a") as file:
        file.write('{"step": 5, "lo')  # a line that a crash cut off
    assert [r["step"] for r in read_metrics(path)] == [1, 2, 3, 4]
    MetricLog(path, after=2).write(record(3))
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]


def test_no_records_yet(tmp_path):
    assert read_metrics(tmp_path / "none.jsonl") == []


def plain():
    return Terminal(Console(file=io.StringIO(), force_terminal=False, width=200))


def test_plain_lines_where_the_output_is_no_terminal(monkeypatch):
    times = iter([10.0, 11.0, 16.0, 17.0, 18.0])
    monkeypatch.setattr(metrics.time, "monotonic", lambda: next(times))
    terminal = plain()
    with terminal.progress(total=100, done=0):
        for step in (1, 2, 60):
            terminal.step(record(step), 100, seconds_left=75)
        terminal.step(record(70, val_loss=2.25), 100, seconds_left=3_700)
        terminal.step(record(100), 100, seconds_left=0)
    lines = terminal._console.file.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["1/100", "60/100", "70/100", "100/100"]  # 2 came too soon after 1
    assert lines[0] == "step      1/100  loss 2.5000  lr 1.00e-03  9,000 tokens/s  1:15 left"
    assert lines[2].endswith("val 2.2500  1:01:40 left")


def test_a_live_line_on_a_terminal():
    terminal = Terminal(Console(file=io.StringIO(), force_terminal=True, width=120))
    with terminal.progress(total=100, done=0):
        terminal.step(record(50), 100, seconds_left=10)
        terminal.step(record(60, val_loss=2.25), 100, seconds_left=10)
    shown = terminal._console.file.getvalue()
    assert "60/100" in shown
    assert "loss 2.5000" in shown
    assert "val 2.2500" in shown


def test_text_is_shown_as_it_is():
    terminal = plain()
    text = "HEART: :heart: [bold]x[/bold]\ttab " + "long " * 100
    terminal.say(text)
    assert terminal._console.file.getvalue() == text + "\n"


def test_clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now[0])
    clock = Clock(seconds=5.0)
    now[0] = 2.0
    assert clock.read() == 7.0
    with clock.paused():
        now[0] = 50.0
        assert clock.read() == 7.0
    now[0] = 51.0
    assert clock.read() == 8.0


def test_a_log_that_cannot_grow_is_named(tmp_path):
    log = MetricLog(tmp_path / "metrics.jsonl", after=0)
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(TransformerJaxError, match=r"metrics.jsonl cannot be written: Is a directory; make room"):
        log.write({"step": 1})
