from tests.shell import forget_the_shell


def test_settings_of_others_go_and_what_tests_read_stays() -> None:
    kept = {"KESTREL_WORLDS": "9", "HOME": "/", "http_proxy": "proxy:3128", "TMPDIR": "/tmp"}
    gone = {"KESTREL_MODEL": "md3", "OTEL_SDK_DISABLED": "true", "KUBERNETES_SERVICE_HOST": "1"}
    environ = {**kept, **gone, "no_proxy": "a.example"}
    forget_the_shell(environ)
    here = "localhost,127.0.0.1,::1,0.0.0.0"
    assert environ.pop("PYTEST_DEBUG_TEMPROOT", "/tmp") == "/tmp"
    assert environ == {**kept, "no_proxy": f"a.example,{here}", "NO_PROXY": here}
