"""``bench``: sends a server requests and measures it from the client's place.

A program makes load with ``run_stage``::

    plan = Plan(Mix({"query": 1.0}, ["How many?"], ["car"]), [image])
    async with AsyncKestrelClient("127.0.0.1:50051") as client:
        tally, health = await run_stage([client], plan, Stage("closed", level=64, window_s=10.0))
    print(tally.ended / 10.0, tally.ttft.percentile(50))
"""
