"""Approximate multipliers as tables of all their products: families, import, errors, structure.

table = find_table("bam-2-4-signed")         # or FILE.npy, FILE.c[:function], FILE.py:function
error_statistics(table).mred
analyse(table).terms                         # the exact products it consists of, proved
"""

from narrowgauge_lab.multipliers.comparing import Difference, difference, error_difference
from narrowgauge_lab.multipliers.errors import CompilerMissingError, TableError, TableSourceError
from narrowgauge_lab.multipliers.families import NAMES, named
from narrowgauge_lab.multipliers.importing import find_table, from_c, from_npy, from_python, is_file
from narrowgauge_lab.multipliers.statistics import ErrorStatistics, error_blocks, error_statistics
from narrowgauge_lab.multipliers.structure import Structure, analyse
from narrowgauge_lab.multipliers.table import Table, make_table
from narrowgauge_lab.multipliers.terms import Factored, Proof, Term, prove

__all__ = [
    "NAMES",
    "CompilerMissingError",
    "Difference",
    "ErrorStatistics",
    "Factored",
    "Proof",
    "Structure",
    "Table",
    "TableError",
    "TableSourceError",
    "Term",
    "analyse",
    "difference",
    "error_blocks",
    "error_difference",
    "error_statistics",
    "find_table",
    "from_c",
    "from_npy",
    "from_python",
    "is_file",
    "make_table",
    "named",
    "prove",
]
