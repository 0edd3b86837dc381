-- One row per (job, period): what ran, what did not, and why.
CREATE TABLE {schema}.job_runs (
    job text NOT NULL,
    period text NOT NULL,
    due_at timestamptz,
    status text NOT NULL,
    attempts integer NOT NULL DEFAULT 0,
    lost_attempts integer NOT NULL DEFAULT 0,
    postponements integer NOT NULL DEFAULT 0,
    rescues integer NOT NULL DEFAULT 0,
    claim uuid,
    name_key bigint,
    task text,
    task_id text,
    entry text,
    node text,
    backend_pid integer,
    term bigint,
    sent_at timestamptz,
    started_at timestamptz,
    finished_at timestamptz,
    retry_at timestamptz,
    reason text,
    error text,
    CONSTRAINT job_runs_job_period_key UNIQUE (job, period),
    CONSTRAINT job_runs_status_check CHECK (
        status IN ('sent', 'running', 'retrying', 'done', 'failed', 'skipped', 'missed')
    )
);

-- Rows that are not settled are few, however long the history is: found by lock name.
CREATE INDEX job_runs_open_idx ON {schema}.job_runs (name_key)
    WHERE status IN ('sent', 'running', 'retrying');

-- Finds the oldest of those that are, for the clean-up.
CREATE INDEX job_runs_settled_idx ON {schema}.job_runs (finished_at)
    WHERE status IN ('done', 'failed', 'skipped', 'missed');
