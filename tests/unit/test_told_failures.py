"""What is told of a publication that failed: one line, and nothing of the message or the password."""

from __future__ import annotations

import pytest
import redis

from celery_pglock import publishing


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError("refused\nwith 'argument'"), "OSError: refused"),
        (
            redis.ResponseError(
                'Command # 1 (LPUSH tasks {"args": "tops3cret\nand more) of pipeline caused error:'
                " OOM command not allowed"
            ),
            "ResponseError: OOM command not allowed",
        ),
        (ValueError("tops3cret"), "ValueError (is broker_url a URL, its password quoted?)"),
        (OSError(), "OSError: "),
    ],
)
def test_one_line(error: Exception, told: str) -> None:
    assert publishing.told(error) == told
