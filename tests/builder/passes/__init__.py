import pytest

pytest.register_assert_rewrite("tests.builder.passes.rewrites")
