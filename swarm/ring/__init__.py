"""Floor 3. Discovery, membership, plan, links, the stage worker."""
