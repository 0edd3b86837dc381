"""What the versions of Celery differ in, where tests hold this package against Celery itself."""

from __future__ import annotations

from typing import Final

import celery

# From then on a stock beat marks its messages; intervals of a day and more count elapsed time; the
# search for an event of the sun goes on where there is none, and fails no more; and a crontab stands
# still in a repeated hour.
FROM_5_7: Final = celery.VERSION >= (5, 7)
# A message that is sent by name says that its result is wanted, whatever its task says. In 5.5 what
# the task says is heeded all the same.
MESSAGE_OUTWEIGHS_TASK: Final = (5, 6) <= celery.VERSION < (5, 7)
