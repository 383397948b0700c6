CREATE SCHEMA golden_9;
CREATE TABLE golden_9.chunks (
    id bigint NOT NULL,
    stream_id integer NOT NULL,
    file text NOT NULL COLLATE pg_catalog."C",
    size_bytes bigint NOT NULL,
    schema_version integer DEFAULT 0 NOT NULL
);
CREATE SEQUENCE golden_9.chunks_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE golden_9.chunks_id_seq OWNED BY golden_9.chunks.id;
CREATE TABLE golden_9.fences (
    owner text NOT NULL COLLATE pg_catalog."C",
    epoch bigint NOT NULL
);
CREATE TABLE golden_9.former_authors (
    stream_id integer NOT NULL,
    directory text NOT NULL COLLATE pg_catalog."C"
);
CREATE TABLE golden_9.former_schemas (
    stream_id integer NOT NULL,
    version integer NOT NULL,
    schema bytea NOT NULL
);
CREATE TABLE golden_9.garbage (
    path text NOT NULL COLLATE pg_catalog."C",
    stream_id integer NOT NULL
);
CREATE TABLE golden_9.holds (
    stream_id integer NOT NULL,
    holder text NOT NULL COLLATE pg_catalog."C",
    segment_id integer NOT NULL,
    "position" bigint NOT NULL,
    life text NOT NULL COLLATE pg_catalog."C",
    epoch bigint NOT NULL
);
CREATE TABLE golden_9.markers (
    owner text NOT NULL COLLATE pg_catalog."C",
    generation bigint NOT NULL,
    checkpoint bigint NOT NULL,
    stream_id integer NOT NULL,
    segment_id integer NOT NULL,
    "position" bigint NOT NULL
);
CREATE TABLE golden_9.meta (
    key text NOT NULL COLLATE pg_catalog."C",
    value text NOT NULL COLLATE pg_catalog."C"
);
CREATE TABLE golden_9.owners (
    owner text NOT NULL COLLATE pg_catalog."C",
    life bytea NOT NULL
);
CREATE TABLE golden_9.participants (
    transaction_id integer NOT NULL,
    participant text NOT NULL COLLATE pg_catalog."C",
    token text NOT NULL COLLATE pg_catalog."C",
    sequence bigint NOT NULL,
    events_count bigint NOT NULL
);
CREATE TABLE golden_9.parts (
    stream_id integer NOT NULL,
    segment_id integer NOT NULL,
    start bigint NOT NULL,
    events_count bigint NOT NULL,
    chunk_id bigint NOT NULL,
    "offset" bigint NOT NULL,
    size_bytes bigint NOT NULL,
    checksum bytea NOT NULL,
    visible_ms bigint DEFAULT '0'::bigint NOT NULL
);
CREATE TABLE golden_9.passed (
    stream_id integer NOT NULL,
    reader text NOT NULL COLLATE pg_catalog."C",
    life text NOT NULL COLLATE pg_catalog."C",
    generation bigint NOT NULL,
    segment_id integer NOT NULL
);
CREATE TABLE golden_9.prepared_parts (
    transaction_id bigint NOT NULL,
    number integer NOT NULL,
    segment_id integer NOT NULL,
    events_count bigint NOT NULL,
    chunk_id bigint NOT NULL,
    "offset" bigint NOT NULL,
    size_bytes bigint NOT NULL,
    checksum bytea NOT NULL
);
CREATE TABLE golden_9.reader_groups (
    name text NOT NULL COLLATE pg_catalog."C",
    version bigint NOT NULL,
    state bytea NOT NULL
);
CREATE TABLE golden_9.segments (
    stream_id integer NOT NULL,
    segment_id integer NOT NULL,
    key_low bigint NOT NULL,
    key_high bigint NOT NULL,
    created_epoch integer NOT NULL,
    closed_epoch integer,
    end_position bigint NOT NULL,
    head_position bigint DEFAULT '0'::bigint NOT NULL,
    latest_ms bigint DEFAULT '0'::bigint NOT NULL
);
CREATE TABLE golden_9.shared_transactions (
    transaction_id integer NOT NULL,
    stream_id integer NOT NULL,
    begun_ms bigint NOT NULL,
    lease_ms bigint NOT NULL,
    due_ms bigint,
    suspected_ms bigint,
    is_expired boolean NOT NULL,
    schema_version integer NOT NULL,
    size_bytes bigint NOT NULL
);
CREATE SEQUENCE golden_9.shared_transactions_transaction_id_seq
    AS integer
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE golden_9.shared_transactions_transaction_id_seq OWNED BY golden_9.shared_transactions.transaction_id;
CREATE TABLE golden_9.streams (
    id integer NOT NULL,
    name text NOT NULL COLLATE pg_catalog."C",
    schema bytea NOT NULL,
    segments_count integer NOT NULL,
    routing_key text COLLATE pg_catalog."C",
    is_sealed boolean NOT NULL,
    created_ms bigint NOT NULL,
    layout_epoch integer DEFAULT 0 NOT NULL,
    retention text COLLATE pg_catalog."C",
    schema_version integer DEFAULT 0 NOT NULL,
    scaling text COLLATE pg_catalog."C",
    scaled_ms bigint DEFAULT '0'::bigint NOT NULL
);
CREATE SEQUENCE golden_9.streams_id_seq
    AS integer
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE golden_9.streams_id_seq OWNED BY golden_9.streams.id;
CREATE TABLE golden_9.transactions (
    id bigint NOT NULL,
    stream_id integer NOT NULL,
    name text NOT NULL COLLATE pg_catalog."C",
    owner text NOT NULL COLLATE pg_catalog."C",
    epoch bigint NOT NULL,
    status text NOT NULL COLLATE pg_catalog."C",
    content text NOT NULL COLLATE pg_catalog."C",
    events_count bigint NOT NULL,
    changed_ms bigint NOT NULL,
    layout_epoch integer DEFAULT 0 NOT NULL
);
CREATE SEQUENCE golden_9.transactions_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE golden_9.transactions_id_seq OWNED BY golden_9.transactions.id;
CREATE TABLE golden_9.writers (
    stream_id integer NOT NULL,
    writer_id text NOT NULL COLLATE pg_catalog."C",
    epoch bigint NOT NULL,
    sequence bigint NOT NULL
);
ALTER TABLE ONLY golden_9.chunks ALTER COLUMN id SET DEFAULT nextval('golden_9.chunks_id_seq'::regclass);
ALTER TABLE ONLY golden_9.shared_transactions ALTER COLUMN transaction_id SET DEFAULT nextval('golden_9.shared_transactions_transaction_id_seq'::regclass);
ALTER TABLE ONLY golden_9.streams ALTER COLUMN id SET DEFAULT nextval('golden_9.streams_id_seq'::regclass);
ALTER TABLE ONLY golden_9.transactions ALTER COLUMN id SET DEFAULT nextval('golden_9.transactions_id_seq'::regclass);
INSERT INTO golden_9.chunks VALUES (1, 2, '2/appended/57a99f8ad6db1448e39c1c03daabdb0b.chunk', 358, 0);
INSERT INTO golden_9.chunks VALUES (2, 1, '1/appended/168ae461c3e244b576f52ec455bd1473.chunk', 631, 0);
INSERT INTO golden_9.chunks VALUES (3, 1, '1/appended/98a0825d6c53bf7c5b09fdb70b10d27d.chunk', 358, 0);
INSERT INTO golden_9.chunks VALUES (4, 1, '1/txn/cd405d0d7b491f5a/1/a0a0d2a4dcf5a902325e56464c10f1eb.chunk', 358, 0);
INSERT INTO golden_9.chunks VALUES (6, 1, '1/txn/6bceea5f3c7fe0a6/7/4ccfd8d6fe81edc091da03c0529919c7.chunk', 487, 1);
INSERT INTO golden_9.chunks VALUES (7, 1, '1/txn/1b2f4fdec82438a9/shared/0643a8ab7e6c3f85/0e88d5f59e853900e65f662f8d03be23.chunk', 487, 1);
INSERT INTO golden_9.chunks VALUES (8, 1, '1/appended/3e73c200b96647e10a35a317006c11bf.chunk', 487, 1);
INSERT INTO golden_9.chunks VALUES (9, 1, '1/txn/6bceea5f3c7fe0a6/7/d0efddc24b732d76d69c37982c5b397f.chunk', 487, 1);
INSERT INTO golden_9.fences VALUES ('pipe/sink', 2);
INSERT INTO golden_9.fences VALUES ('mine', 7);
INSERT INTO golden_9.former_schemas VALUES (1, 0, '\xffffffffa80000001000000000000a000c000600050008000a000000000104000c00000008000800000004000800000004000000020000005000000004000000c8ffffff00000102100000002000000004000000000000000500000076616c756500000008000c0008000700080000000000000140000000100014000800060007000c0000001000100000000000011410000000180000000400000000000000030000006b6579000400040004000000');
INSERT INTO golden_9.holds VALUES (1, 'reader group billing', 0, 0, '', 0);
INSERT INTO golden_9.holds VALUES (1, 'reader group billing', 1, 0, '', 0);
INSERT INTO golden_9.meta VALUES ('version', '9');
INSERT INTO golden_9.meta VALUES ('chunks', '@PLACE@');
INSERT INTO golden_9.meta VALUES ('store_id', '159a8c0065a238baeda91dd3c7f09d95');
INSERT INTO golden_9.owners VALUES ('pipe/sink', '\x68656164676174652d6c696665203120346131346462353932343435636430610a7b0a20226964223a20226c696665222c0a2022686f6d65223a20222f636865636b706f696e7473222c0a2022686f7374223a2022686f7374222c0a2022626567756e5f6d73223a20313730303030303030303030302c0a202261667465725f67656e65726174696f6e223a20300a7d');
INSERT INTO golden_9.participants VALUES (4, 'w', 'ed568f136f663c8d308ae932c3c1635e', 1, 1);
INSERT INTO golden_9.parts VALUES (2, 0, 0, 1, 1, 64, 240, '\x16ed330c93f0b034', 1795646473935);
INSERT INTO golden_9.parts VALUES (1, 0, 0, 1, 2, 64, 248, '\x2ea7529c117857cf', 1795646474111);
INSERT INTO golden_9.parts VALUES (1, 1, 0, 1, 2, 320, 240, '\xbe52426a42e48482', 1795646474111);
INSERT INTO golden_9.parts VALUES (1, 1, 1, 1, 3, 64, 240, '\xc2023450d4964b63', 1795646474187);
INSERT INTO golden_9.parts VALUES (1, 1, 2, 1, 4, 64, 240, '\x6593ab3b81481564', 1795646474451);
INSERT INTO golden_9.parts VALUES (1, 1, 3, 1, 6, 64, 328, '\x488399e44423b6a3', 1795646474738);
INSERT INTO golden_9.parts VALUES (1, 3, 0, 1, 7, 64, 328, '\x4c87f4883caa2241', 1795646474921);
INSERT INTO golden_9.parts VALUES (1, 1, 4, 1, 8, 64, 328, '\xf720f51c3b4ef180', 1795646474971);
INSERT INTO golden_9.prepared_parts VALUES (5, 0, 2, 1, 9, 64, 328, '\x1d2ea001fd21a4b9');
INSERT INTO golden_9.reader_groups VALUES ('billing', 1, '\x7b22666f726d6174223a312c2273747265616d73223a7b226170702f6576656e7473223a317d2c226b657074223a312c2265706f6368223a312c227265736574223a22222c2270726f6772657373223a7b226170702f6576656e7473223a5b5b5b302c305d2c5b312c305d5d2c5b5d2c5b5d5d7d2c2272656164657273223a7b7d2c226f776e657273223a5b5d2c226c656176696e67223a5b5d2c22636865636b706f696e7473223a5b5d7d');
INSERT INTO golden_9.segments VALUES (2, 0, 0, 4294967296, 0, NULL, 1, 0, 1795646473935);
INSERT INTO golden_9.segments VALUES (1, 0, 0, 2147483648, 0, 1, 1, 0, 1795646474111);
INSERT INTO golden_9.segments VALUES (1, 2, 0, 1073741824, 1, NULL, 0, 0, 1795646474451);
INSERT INTO golden_9.segments VALUES (1, 3, 1073741824, 2147483648, 1, NULL, 1, 0, 1795646474921);
INSERT INTO golden_9.segments VALUES (1, 1, 2147483648, 4294967296, 0, NULL, 5, 0, 1795646474971);
INSERT INTO golden_9.shared_transactions VALUES (4, 1, 1795646474794, 600000, NULL, NULL, false, 1, 328);
INSERT INTO golden_9.streams VALUES (2, 'app/done', '\xffffffffa80000001000000000000a000c000600050008000a000000000104000c00000008000800000004000800000004000000020000005000000004000000c8ffffff00000102100000002000000004000000000000000500000076616c756500000008000c0008000700080000000000000140000000100014000800060007000c0000001000100000000000011410000000180000000400000000000000030000006b6579000400040004000000', 1, NULL, true, 1795646473628, 0, NULL, 0, NULL, 1795646473628);
INSERT INTO golden_9.streams VALUES (1, 'app/events', '\xffffffffd80000001000000000000a000c000600050008000a000000000104000c00000008000800000004000800000004000000030000007c0000003000000004000000a0ffffff0000011410000000180000000400000000000000040000006e6f74650000000094ffffffc8ffffff00000102100000002000000004000000000000000500000076616c756500000008000c0008000700080000000000000140000000100014000800060007000c0000001000100000000000011410000000180000000400000000000000030000006b657900040004000400000000000000', 3, 'key', false, 1795646473595, 1, '{"age_ms": null, "size_bytes": 1073741824}', 1, NULL, 1795646474626);
INSERT INTO golden_9.transactions VALUES (1, 1, 'pipe/sink/checkpoint-1/subtask-0/generation-1', 'pipe/sink', 1, 'committed', '1/txn/cd405d0d7b491f5a/1/a0a0d2a4dcf5a902325e56464c10f1eb.chunk', 1, 1795646474451, 0);
INSERT INTO golden_9.transactions VALUES (2, 1, 'pipe/sink/checkpoint-2/subtask-0/generation-1', 'pipe/sink', 1, 'aborted', '1/txn/cd405d0d7b491f5a/1/f14d0fbabfb15ca5e02c3be6a77b6133.chunk', 1, 1795646474493, 0);
INSERT INTO golden_9.transactions VALUES (3, 1, 'batch-1', 'mine', 7, 'committed', '1/txn/6bceea5f3c7fe0a6/7/4ccfd8d6fe81edc091da03c0529919c7.chunk', 1, 1795646474738, 1);
INSERT INTO golden_9.transactions VALUES (4, 1, 'd36ca56107db110bc077f45f72295e23', 'writers', 0, 'committed', '', 1, 1795646474921, 1);
INSERT INTO golden_9.transactions VALUES (5, 1, 'batch-2', 'mine', 7, 'prepared', '1/txn/6bceea5f3c7fe0a6/7/d0efddc24b732d76d69c37982c5b397f.chunk', 1, 1795646474996, 1);
INSERT INTO golden_9.writers VALUES (1, 'importer', 3, 2);
SELECT pg_catalog.setval('golden_9.chunks_id_seq', 9, true);
SELECT pg_catalog.setval('golden_9.shared_transactions_transaction_id_seq', 1, false);
SELECT pg_catalog.setval('golden_9.streams_id_seq', 2, true);
SELECT pg_catalog.setval('golden_9.transactions_id_seq', 5, true);
ALTER TABLE ONLY golden_9.chunks
    ADD CONSTRAINT chunks_file_key UNIQUE (file);
ALTER TABLE ONLY golden_9.chunks
    ADD CONSTRAINT chunks_pkey PRIMARY KEY (id);
ALTER TABLE ONLY golden_9.fences
    ADD CONSTRAINT fences_pkey PRIMARY KEY (owner);
ALTER TABLE ONLY golden_9.former_authors
    ADD CONSTRAINT former_authors_pkey PRIMARY KEY (stream_id, directory);
ALTER TABLE ONLY golden_9.former_schemas
    ADD CONSTRAINT former_schemas_pkey PRIMARY KEY (stream_id, version);
ALTER TABLE ONLY golden_9.garbage
    ADD CONSTRAINT garbage_pkey PRIMARY KEY (path);
ALTER TABLE ONLY golden_9.holds
    ADD CONSTRAINT holds_pkey PRIMARY KEY (stream_id, holder, segment_id);
ALTER TABLE ONLY golden_9.markers
    ADD CONSTRAINT markers_pkey PRIMARY KEY (owner, generation, checkpoint, stream_id, segment_id);
ALTER TABLE ONLY golden_9.meta
    ADD CONSTRAINT meta_pkey PRIMARY KEY (key);
ALTER TABLE ONLY golden_9.owners
    ADD CONSTRAINT owners_pkey PRIMARY KEY (owner);
ALTER TABLE ONLY golden_9.participants
    ADD CONSTRAINT participants_pkey PRIMARY KEY (transaction_id, participant);
ALTER TABLE ONLY golden_9.parts
    ADD CONSTRAINT parts_pkey PRIMARY KEY (stream_id, segment_id, start);
ALTER TABLE ONLY golden_9.passed
    ADD CONSTRAINT passed_pkey PRIMARY KEY (stream_id, reader, life, generation, segment_id);
ALTER TABLE ONLY golden_9.prepared_parts
    ADD CONSTRAINT prepared_parts_pkey PRIMARY KEY (transaction_id, number);
ALTER TABLE ONLY golden_9.reader_groups
    ADD CONSTRAINT reader_groups_pkey PRIMARY KEY (name);
ALTER TABLE ONLY golden_9.segments
    ADD CONSTRAINT segments_pkey PRIMARY KEY (stream_id, segment_id);
ALTER TABLE ONLY golden_9.shared_transactions
    ADD CONSTRAINT shared_transactions_pkey PRIMARY KEY (transaction_id);
ALTER TABLE ONLY golden_9.streams
    ADD CONSTRAINT streams_name_key UNIQUE (name);
ALTER TABLE ONLY golden_9.streams
    ADD CONSTRAINT streams_pkey PRIMARY KEY (id);
ALTER TABLE ONLY golden_9.transactions
    ADD CONSTRAINT transactions_pkey PRIMARY KEY (id);
ALTER TABLE ONLY golden_9.transactions
    ADD CONSTRAINT transactions_stream_id_name_key UNIQUE (stream_id, name);
ALTER TABLE ONLY golden_9.writers
    ADD CONSTRAINT writers_pkey PRIMARY KEY (stream_id, writer_id);
CREATE INDEX ix_chunks_stream_id ON golden_9.chunks USING btree (stream_id);
CREATE INDEX ix_garbage_stream_id ON golden_9.garbage USING btree (stream_id);
CREATE INDEX ix_parts_chunk_id ON golden_9.parts USING btree (chunk_id);
CREATE INDEX ix_transactions_owner ON golden_9.transactions USING btree (owner);
CREATE INDEX open_transactions ON golden_9.shared_transactions USING btree (stream_id, due_ms);
CREATE INDEX present_segments ON golden_9.segments USING btree (stream_id, closed_epoch);
