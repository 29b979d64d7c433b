-- The SQLite file of batches, and the temporary tables of the process that has it open (database.py).
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS files (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, purpose TEXT NOT NULL, filename TEXT NOT NULL, bytes INTEGER NOT NULL,
    created_at INTEGER NOT NULL, expires_at INTEGER NOT NULL, content BLOB, batch_id TEXT, succeeded INTEGER);
CREATE INDEX IF NOT EXISTS files_of ON files (owner, created_at);
CREATE INDEX IF NOT EXISTS outputs_of ON files (batch_id) WHERE batch_id IS NOT NULL;
CREATE TABLE IF NOT EXISTS batches (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, caller TEXT NOT NULL, status TEXT NOT NULL, endpoint TEXT NOT NULL,
    input_file_id TEXT NOT NULL, completion_window TEXT NOT NULL, metadata TEXT NOT NULL, errors TEXT,
    created_at INTEGER NOT NULL, ended_at INTEGER, expires_at INTEGER NOT NULL, kept_until INTEGER NOT NULL,
    bytes INTEGER NOT NULL, total INTEGER NOT NULL,
    completed INTEGER NOT NULL, failed INTEGER NOT NULL, output_file_id TEXT, error_file_id TEXT);
CREATE INDEX IF NOT EXISTS batches_of ON batches (owner, created_at);
CREATE INDEX IF NOT EXISTS open_batches_of ON batches (owner, created_at) WHERE ended_at IS NULL;
CREATE TABLE IF NOT EXISTS requests (
    batch_id TEXT NOT NULL, number INTEGER NOT NULL, custom_id TEXT NOT NULL, body BLOB, line BLOB, succeeded INTEGER,
    PRIMARY KEY (batch_id, number)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS waiting ON requests (batch_id, number) WHERE line IS NULL;
DELETE FROM requests WHERE batch_id NOT IN (SELECT id FROM batches);  -- They were arriving when the process ended.
COMMIT;

-- Each owner's bytes of files and batches: their sum over all rows would take a caller's time for each answer.
PRAGMA temp_store = MEMORY;
CREATE TEMP TABLE held (owner TEXT PRIMARY KEY, bytes INTEGER NOT NULL) WITHOUT ROWID;
INSERT INTO held SELECT owner, sum(size) FROM (
    SELECT owner, bytes AS size FROM files UNION ALL
    SELECT owner, bytes + $batch_bytes + length(metadata) + length(coalesce(errors, '')) FROM batches) GROUP BY owner;
CREATE TEMP TRIGGER file_added AFTER INSERT ON main.files BEGIN
    INSERT INTO held VALUES (new.owner, new.bytes) ON CONFLICT DO UPDATE SET bytes = bytes + excluded.bytes; END;
CREATE TEMP TRIGGER file_deleted AFTER DELETE ON main.files BEGIN
    UPDATE held SET bytes = bytes - old.bytes WHERE owner = old.owner; END;
CREATE TEMP TRIGGER batch_added AFTER INSERT ON main.batches BEGIN
    INSERT INTO held VALUES (
        new.owner, new.bytes + $batch_bytes + length(new.metadata) + length(coalesce(new.errors, '')))
        ON CONFLICT DO UPDATE SET bytes = bytes + excluded.bytes; END;
CREATE TEMP TRIGGER batch_changed AFTER UPDATE ON main.batches BEGIN
    UPDATE held SET bytes = bytes + new.bytes + length(new.metadata) + length(coalesce(new.errors, ''))
        - old.bytes - length(old.metadata) - length(coalesce(old.errors, '')) WHERE owner = old.owner; END;
CREATE TEMP TRIGGER batch_deleted AFTER DELETE ON main.batches BEGIN
    UPDATE held
        SET bytes = bytes - old.bytes - $batch_bytes - length(old.metadata) - length(coalesce(old.errors, ''))
        WHERE owner = old.owner; END;
