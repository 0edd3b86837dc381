-- What each schedule entry was last sent for, and when it is due next.
CREATE TABLE {schema}.beat_entries (
    namespace text NOT NULL,
    entry text NOT NULL,
    task text NOT NULL,
    schedule text NOT NULL,
    definition jsonb,
    anchor timestamptz NOT NULL,
    due_at timestamptz,
    task_id text,
    published_at timestamptz,
    total_run_count bigint NOT NULL DEFAULT 0,
    next_due_at timestamptz,
    paused_until timestamptz,
    paused_reason text,
    seen_at timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),
    CONSTRAINT beat_entries_pkey PRIMARY KEY (namespace, entry)
);

-- Who leads, and since when; one row per namespace, its term only grows.
CREATE TABLE {schema}.beat_terms (
    namespace text NOT NULL,
    term bigint NOT NULL,
    node text NOT NULL,
    backend_pid integer NOT NULL,
    elected_at timestamptz NOT NULL,
    last_tick_at timestamptz NOT NULL,
    resigned_at timestamptz,
    fingerprint text,
    missed_until timestamptz,
    CONSTRAINT beat_terms_pkey PRIMARY KEY (namespace)
);
