using UnrealBuildTool;

public class Ludus : ModuleRules
{
	public Ludus(ReadOnlyTargetRules Target) : base(Target)
	{
		PCHUsage = PCHUsageMode.UseExplicitOrSharedPCHs;
		PublicDependencyModuleNames.AddRange(new[] { "Core", "CoreUObject", "Engine" });
		if (Target.Platform == UnrealTargetPlatform.Win64) PublicSystemLibraries.Add("Ws2_32.lib");
	}
}
