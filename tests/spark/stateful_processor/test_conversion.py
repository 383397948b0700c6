"""DDL text that is read without a JVM; ``test_side_by_side`` compares it with Spark's own reading."""

from __future__ import annotations

import pytest
from pyspark.sql import types as t
from pyspark.sql.types import StructField, StructType

from headgate.spark.stateful_handles import struct_of

READ = {
    "a INT": StructType([StructField("a", t.IntegerType())]),
    " A: bigint , b String NOT NULL ": StructType(
        [StructField("A", t.LongType()), StructField("b", t.StringType(), False)]
    ),
    "`a ``b` double comment 'it\\'s, so'": StructType([StructField("a `b", t.DoubleType())]),
    "x ARRAY<STRUCT<y: MAP<STRING, DECIMAL(10, 2)>, z: varchar(5)>>": StructType(
        [
            StructField(
                "x",
                t.ArrayType(
                    StructType(
                        [
                            StructField("y", t.MapType(t.StringType(), t.DecimalType(10, 2))),
                            StructField("z", t.StringType()),
                        ]
                    )
                ),
            )
        ]
    ),
    "`not` INT, n DECIMAL": StructType([StructField("not", t.IntegerType()), StructField("n", t.DecimalType())]),
}
UNREAD = {
    "": "ends too early",
    "a": "ends too early",
    "a INT,": "ends too early",
    "a INT b INT": "',' was expected at 'b'",
    "a ARRAY<INT": "ends too early",
    "a ARRAY<INT>>": "',' was expected at '>'",
    "a MAP<INT>": "',' was expected at '>'",
    "a BLOB": "there is no type 'blob'",
    "a INT; b INT": "is not understood",
    "<a> INT": "a name was expected at '<'",
    "a INT NOT b": "'null' was expected at 'b'",
}


@pytest.mark.parametrize("text", READ)
def test_text_is_read_as_spark_reads_it(text: str) -> None:
    found = struct_of(text)
    assert [(f.name, f.dataType, f.nullable) for f in found] == [(f.name, f.dataType, f.nullable) for f in READ[text]]


@pytest.mark.parametrize("text", UNREAD)
def test_text_that_is_no_schema_is_told(text: str) -> None:
    with pytest.raises(ValueError, match=UNREAD[text]):
        struct_of(text)
