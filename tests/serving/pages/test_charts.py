"""What is drawn on a page."""

import re
from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from serving.pages.charts import Mark, risk_chart
from serving.scores.reading import PastScore

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
WORD = re.compile(r'<g class="mark[^>]*>.*?<text class="tick (end|start)" x="([\d.-]+)" y="([\d.]+)">([^<]*)</text>')


@given(st.lists(st.tuples(st.floats(0, 300), st.sampled_from(["drain", "soft taint", "failure"])), max_size=30))
def test_no_word_of_a_timeline_covers_another_and_every_mark_has_a_title(happened):
    scores = [PastScore(BEGIN + timedelta(hours=6 * step), 0.1, "watch") for step in range(40)]
    marks = [Mark(BEGIN + timedelta(hours=hours), "action", word, word) for hours, word in happened]
    drawn = str(risk_chart(scores, {}, "risk", marks))
    assert drawn.count('<g class="mark') == drawn.count("</title><path") == len(marks)
    taken = []
    for side, beside, line, word in WORD.findall(drawn):
        end = float(beside) if side == "end" else float(beside) + 6.5 * len(word)
        start = end - 6.5 * len(word)
        assert 0 <= start < end <= 720
        assert all(line != other or end <= left or right <= start for left, right, other in taken)
        taken.append((start, end, line))
    assert bool(taken) == bool(marks)
