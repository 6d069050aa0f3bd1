// Functions in the simulation of the game: create soldiers, remove them and read their states.
(function () {
  globalThis.ludus = {
    // rows: [template, player, x, z, angle] → ids. Soldiers of stance "none" act on commands alone.
    spawn: (rows) =>
      rows.map(([template, player, x, z, angle]) => {
        const id = Engine.AddEntity(template);
        const position = Engine.QueryInterface(id, IID_Position);
        position.JumpTo(x, z);
        position.SetYRotation(angle);
        Engine.QueryInterface(id, IID_Ownership).SetOwner(player);
        Engine.QueryInterface(id, IID_UnitAI).SwitchToStance("none");
        return id;
      }),
    remove: (ids) => {
      for (const id of ids) if (Engine.QueryInterface(id, IID_Health)) Engine.DestroyEntity(id);
      return ids.length;
    },
    // x, z and hitpoints of every id, in one list; zeros for the dead.
    states: (ids) => {
      const found = [];
      for (const id of ids) {
        const health = Engine.QueryInterface(id, IID_Health);
        const position = Engine.QueryInterface(id, IID_Position);
        if (!health || !position || !position.IsInWorld() || health.GetHitpoints() <= 0) found.push(0, 0, 0);
        else {
          const place = position.GetPosition2D();
          found.push(place.x, place.y, health.GetHitpoints());
        }
      }
      return found;
    },
    // [hitpoints, range of its attack, 1 if it shoots] of a template.
    facts: (template) => {
      const id = Engine.AddEntity(template);
      const attack = Engine.QueryInterface(id, IID_Attack);
      const kind = attack.GetAttackTypes().find((one) => one === "Melee" || one === "Ranged");
      const found = [Engine.QueryInterface(id, IID_Health).GetMaxHitpoints(), attack.GetRange(kind).max, kind === "Ranged" ? 1 : 0];
      Engine.DestroyEntity(id);
      return found;
    },
  };
  return 1;
})();
