"""Runs Home Assistant's core with the package of deploy/homeassistant, moves something, and prints what the automation
wrote: ``with_homeassistant.py HTTP_ADDRESS IMAGE FOLDER``. No camera is there: its snapshot is the image."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import sys
from pathlib import Path

from homeassistant import bootstrap, config, config_entries, core, loader, runner
from homeassistant.helpers.check_config import async_check_ha_config_file
from homeassistant.setup import async_setup_component

address, image, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
FILES = Path(__file__).parents[2] / "deploy/homeassistant"
WRITTEN = "input_text.kestrel_driveway"


def written(text: str, instead: dict[str, str]) -> str:
    for old, new in instead.items():
        assert old in text, old
        text = text.replace(old, new)
    return text


logging.basicConfig(level=logging.WARNING)


async def main() -> dict[str, object]:
    (folder / "packages").mkdir()
    shutil.copy(FILES / "kestrel_ask.py", folder)
    (folder / "kestrel_token").write_text("k" * 40 + "\n")
    package = (FILES / "kestrel.yaml").read_text()
    instead = {
        "http://127.0.0.1:2020": address,
        "python3 /config/": f"{sys.executable} {folder}/",
        "/config/www/": f"{folder}/",
        "text: car": "text: green crescent",
        "Is the gate open? Answer yes or no.": 'How many "green crescents" are there?',
    }
    (folder / "packages/kestrel.yaml").write_text(written(package, instead))
    (folder / "configuration.yaml").write_text(
        "homeassistant:\n  packages: !include_dir_named packages\n"
    )
    hass = core.HomeAssistant(str(folder))
    hass.config.skip_pip = True
    loader.async_setup(hass)
    hass.config_entries = config_entries.ConfigEntries(hass, {})
    await bootstrap.async_load_base_functionality(hass)
    checked = await async_check_ha_config_file(hass)
    assert not checked.errors and not checked.warnings, (checked.errors, checked.warnings)
    read = await config.async_hass_config_yaml(hass)
    await config.async_process_ha_core_config(hass, read["homeassistant"])

    async def snapshot(call: core.ServiceCall) -> None:
        assert call.data["entity_id"] == ["camera.driveway"]
        shutil.copy(image, call.data["filename"])

    hass.services.async_register("camera", "snapshot", snapshot)
    hass.states.async_set("binary_sensor.driveway_motion", "off")
    for domain in ("input_text", "shell_command", "script", "automation"):
        assert await async_setup_component(hass, domain, read), domain
    await hass.async_start()
    await hass.async_block_till_done()  # The automation waits for its trigger now.
    told = asyncio.Event()

    @core.callback
    def changed(event: core.Event) -> None:
        if event.data["entity_id"] == WRITTEN:
            told.set()

    hass.bus.async_listen("state_changed", changed)
    hass.states.async_set("binary_sensor.driveway_motion", "on")
    async with asyncio.timeout(60):
        await told.wait()
    state = hass.states.get(WRITTEN)
    asked = {"skill": "detect", "file": f"{folder}/no such $(file)", "text": "a; b"}
    answered = await hass.services.async_call(
        "shell_command", "kestrel_ask", asked, blocking=True, return_response=True
    )
    await hass.async_stop(force=True)
    return {"told": state.state, "missing": answered}


asyncio.set_event_loop_policy(runner.HassEventLoopPolicy(False))
print(json.dumps(asyncio.run(main())))
