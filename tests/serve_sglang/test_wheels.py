"""What `kvcq serve` asks of a running SGLang, against the sources of every supported release."""

from __future__ import annotations

import ast
from types import SimpleNamespace

import pytest
import torch

from kvcq.pipeline.sglang import arguments
from kvcq.pipeline.sglang.failure import _scheduler
from kvcq.runtime.sglang import gate
from tests.runtime.sglang.wheels import VERSIONS, Sources

pytestmark = pytest.mark.network
HTTP = "sglang.srt.entrypoints.http_server"
ARGS = "sglang.srt.server_args.ServerArgs"


@pytest.fixture(params=VERSIONS)
def sources(request):
    return Sources(request.param)


def run(sources, target, **names):
    """Return a function of SGLang, alone."""
    function = sources.function(target)
    function.decorator_list = []
    function.returns = None
    for argument in function.args.args:
        argument.annotation = None
    scope = dict(names)
    exec(compile(ast.Module([function], []), target, "exec"), scope)  # noqa: S102
    return scope[function.name]


def test_every_path_that_is_asked_exists(sources):
    decorators = [
        ast.unparse(decorator)
        for node in ast.walk(sources.tree(HTTP))
        if isinstance(node, ast.AsyncFunctionDef)
        for decorator in node.decorator_list
    ]
    for method, path in (("get", "/health"), ("get", "/server_info")):
        assert f"app.{method}('{path}')" in decorators
    assert any("'/generate'" in text and "POST" in text for text in decorators)


def test_the_state_of_the_schedulers_is_in_the_servers_account(sources):
    constants = [
        node.value for node in ast.walk(sources.function(f"{HTTP}.server_info")) if isinstance(node, ast.Constant)
    ]
    assert "internal_states" in constants


def test_a_server_that_starts_or_ends_is_not_well(sources):
    text = ast.unparse(sources.function(f"{HTTP}.health_generate"))
    assert "ServerStatus.Starting" in text
    assert "gracefully_exit" in text
    assert "503" in text


def test_every_flag_that_is_passed_is_a_field(sources):
    fields = set(sources.fields(ARGS))
    bare = {"json_model_override_args", "enable_metrics", "skip_server_warmup"}
    passed = {*arguments.OWN, *arguments.SET, *arguments.MANY, *bare}
    advised = {"api_key", "mem_fraction_static", "chunked_prefill_size", "max_queued_requests", "tp_size"}
    assert passed | advised <= fields


def test_every_field_that_is_refused_exists_in_some_release():
    fields = {name for version in VERSIONS for name in Sources(version).fields(ARGS)}
    # Not a field: it is read before the others.
    assert set(arguments.UNPROVABLE) - fields == {"config"}


def test_requests_have_the_fields_that_are_sent(sources):
    fields = set(sources.fields("sglang.srt.managers.io_struct.GenerateReqInput"))
    assert {"input_ids", "sampling_params", "return_logprob", "logprob_start_len", "token_ids_logprob"} <= fields


def test_log_probs_of_ids_begin_after_the_first_token(sources):
    target = "sglang.srt.managers.scheduler_components.logprob_result_processor."
    (owner,) = (node.name for node in sources.tree(target[:-1]).body if isinstance(node, ast.ClassDef))
    process = run(sources, f"{target}{owner}._process_input_token_ids_logprobs", torch=torch)
    logprob = SimpleNamespace(token_ids_logprob=[7, 9])
    request = SimpleNamespace(
        logprob=logprob,
        temp_input_token_ids_logprobs_val=[[[0.0, 0.5], [1.0, 1.5]], [[2.0, 2.5]]],
        temp_input_token_ids_logprobs_idx=[[[7, 9], [7, 9]], [[7, 9]]],
    )
    process(SimpleNamespace(_is_multi_item_scoring=lambda _: False), request)
    # Rows of positions start, start + 1 and the last one, which predicts a token beyond the prompt.
    assert logprob.input_token_ids_logprobs_val == [None, [0.0, 0.5], [1.0, 1.5]]
    assert logprob.input_token_ids_logprobs_idx == [None, [7, 9], [7, 9]]


def test_a_prompt_with_log_probs_may_be_read_from_the_cache_up_to_where_they_start(sources):
    longest = run(sources, "sglang.srt.managers.schedule_batch.Req._compute_max_prefix_len")
    assert longest(SimpleNamespace(return_logprob=True, logprob_start_len=256), 512) == 256
    assert longest(SimpleNamespace(return_logprob=False, logprob_start_len=-1), 512) == 511


def test_the_account_of_cached_tokens_is_in_the_answer(sources):
    text = sources.text("sglang.srt.managers.tokenizer_manager")
    assert "meta_info['input_token_ids_logprobs'] =" in text.replace('"', "'")
    assert "'cached_tokens': recv_obj.cached_tokens[i]" in text.replace('"', "'")


def test_a_scheduler_that_ends_is_told_with_its_exit_code(sources):
    died = run(sources, "sglang.srt.entrypoints.engine._scheduler_died_error")
    line = str(died(1, SimpleNamespace(join=lambda timeout: None, exitcode=5)))
    assert _scheduler([line], 1) == 5
    assert _scheduler([str(died(0, SimpleNamespace(join=lambda timeout: None, exitcode=-9)))], 1) == 1


def test_the_gate_stands_in_front_of_all_that_listens(sources):
    launch = ast.unparse(sources.function(f"{HTTP}.launch_server"))
    assert launch.index("Engine._launch_subprocesses(") < launch.index("_setup_and_run_http_server(")
    assert "server_args.check_server_args()" in ast.unparse(
        sources.function("sglang.srt.entrypoints.engine.Engine._launch_subprocesses")
    )
    assert "\napp = FastAPI(" in sources.text(HTTP)
    served = ast.unparse(sources.function(f"{HTTP}._setup_and_run_http_server"))
    # One process serves the object; several import a module of their own, and so may HTTP 2.
    assert "uvicorn.run(app," in served and "if server_args.tokenizer_worker_num == 1:" in served
    assert "middleware_stack" not in sources.text(HTTP)
    fields = set(sources.fields(ARGS))
    assert {"tokenizer_worker_num", "enable_http2", "grpc_mode", "encoder_only", "use_ray"} <= fields
    assert (f"def {gate.NATIVE}(" in sources.text(HTTP)) == ("grpc_port" in fields)


def test_a_server_that_does_not_warm_up_is_well_at_once(sources):
    text = ast.unparse(sources.function(f"{HTTP}._wait_and_warmup"))
    assert "not server_args.skip_server_warmup" in text
    assert "else:\n        _global_state.tokenizer_manager.server_status = ServerStatus.Up" in text


def test_the_server_is_started_by_its_module_and_loads_plugins_first(sources):
    text = sources.text("sglang.launch_server")
    main = text[text.index("__main__") :]
    assert main.index("load_plugins()") < main.index("prepare_server_args(sys.argv[1:])") < main.index("run_server(")
